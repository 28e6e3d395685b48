"""Workers that read late miss no change of the pool, nor the exit of another worker; one that hangs
is killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import Mock

import pytest
from support.ports import left_port

from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.errors import AddressInUse
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.ops.worker_link import (
    ChangeMessage,
    WorkerExited,
    WorkerLink,
    WorkerLoads,
    WorkerMessage,
    decode_message,
    encode_message,
)
from mooncake_proxy.ops.worker_processes import (
    HANG_S,
    MAX_LOOK_S,
    WorkerSupervisor,
    _reserve,
)
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.pool.membership import ChangeOperation, MembershipChange, follow_source
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.proxy_options import build_parser

ADDED = MembershipChange(ChangeOperation.ADD, "http://d2:1", role=Role.DECODE)
DRAINED = MembershipChange(ChangeOperation.DRAIN, "http://d2:1")


def fill(link: socket.socket) -> None:
    """Write until the socket's buffer is full."""
    link.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            link.send(encode_message(WorkerExited(99)))


def read_all(link: socket.socket) -> list[WorkerMessage]:
    link.setblocking(False)
    found = []
    while True:
        try:
            found.append(decode_message(link.recv(1 << 20)))
        except BlockingIOError:
            return [each for each in found if each != WorkerExited(99)]


@pytest.fixture
def supervisor() -> Iterator[WorkerSupervisor]:
    flags = ["--prefill", "http://p:1", "--decode", "http://d:1", "--port", "0", "--workers", "2"]
    found = WorkerSupervisor(config_from(build_parser().parse_args(flags)), lambda *_: None)
    yield found
    found._reserved.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    yield ends
    for end in ends:
        end.close()


def test_late_worker_receives_all_missed_changes(
    supervisor: WorkerSupervisor,
    pair: tuple[socket.socket, socket.socket],
) -> None:
    first, firsts = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    second, seconds = pair
    supervisor._links = {0: first, 1: second}
    fill(second)
    for change in (ADDED, DRAINED):
        firsts.send(encode_message(ChangeMessage(change)))
        supervisor._relay(0)
    supervisor._publish_gone(7)
    supervisor._resend_missed()
    assert read_all(seconds) == []
    supervisor._resend_missed()
    [history, gone] = read_all(seconds)
    assert history.changes == [ADDED, DRAINED]
    assert gone == WorkerExited(7)
    supervisor._resend_missed()
    assert read_all(seconds) == [], "it is sent once"
    for each in (first, firsts):
        each.close()


def test_changes_do_not_outlive_an_instance_that_its_source_declares_anew(
    supervisor: WorkerSupervisor, pair: tuple[socket.socket, socket.socket]
) -> None:
    parents, workers = pair
    parents.setblocking(False)
    supervisor._links = {0: parents}
    d2 = InstanceSpec(Origin.parse("http://d2:1"), Role.DECODE, source="file")

    def logged() -> list[MembershipChange]:
        for _ in range(2):
            supervisor._relay(0)
        return [one for message in supervisor._changes.messages(0.0) for one in message.changes]

    async def main() -> None:
        link, pools = WorkerLink(0, workers), ModelPools(ClientContext())
        follow_source(pools, [d2], "file")  # at the start: it still has to get earlier changes
        link.open(Mock(pools=pools, share_reservations=lambda: None), Mock(), Mock())
        link.broadcast(DRAINED)
        for wanted in ([d2], []):
            follow_source(pools, wanted, "file")
            assert logged() == [DRAINED]
        follow_source(pools, [d2], "file")
        assert logged() == []
        link.broadcast(DRAINED)
        assert logged() == [DRAINED]
        link.close()

    asyncio.run(main())


def test_change_is_sent_later_if_parent_buffer_is_full(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    parents, workers = pair
    fill(workers)
    link = WorkerLink(0, workers)
    for change in (ADDED, DRAINED):
        link.broadcast(change)
    assert read_all(parents) == []
    link._send_changes()
    assert read_all(parents) == [ChangeMessage(ADDED), ChangeMessage(DRAINED)]


def test_worker_that_hangs_is_killed(
    supervisor: WorkerSupervisor,
    pair: tuple[socket.socket, socket.socket],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not one that is starting, nor after a time in which the parent itself was stopped."""
    parents, workers = pair
    parents.setblocking(False)
    supervisor._links = {0: parents}
    now, steps = supervisor._watched_at, int(HANG_S / MAX_LOOK_S)
    with subprocess.Popen(["sleep", "600"]) as worker:
        try:
            supervisor._pids = {0: worker.pid}
            for _ in range(2 * steps):
                now += MAX_LOOK_S
                supervisor._kill_hung(now)
            for pause_s in (1000.0, *[MAX_LOOK_S] * (steps - 2)):
                workers.send(encode_message(WorkerLoads(0, {}, 0, 0)))
                supervisor._relay(0)
                now += pause_s
                supervisor._kill_hung(now)
            for _ in range(steps - 2):
                now += MAX_LOOK_S
                supervisor._kill_hung(now)
            assert not caplog.text
            now += MAX_LOOK_S
            supervisor._kill_hung(now)
            assert worker.wait(10) == -signal.SIGKILL
        finally:
            worker.kill()
    assert "worker 0 hangs" in caplog.text


@pytest.mark.parametrize("reuse_port", [False, True], ids=["one process", "workers"])
def test_port_is_taken_over_at_once_and_belongs_to_one(*, reuse_port: bool) -> None:
    """After a predecessor with or without workers; before its own workers listen, too."""
    port = left_port(reuse_port=reuse_port)
    with _reserve("127.0.0.1", port), pytest.raises(AddressInUse):
        _reserve("127.0.0.1", port)
