"""Workers that read late miss no change of the pool, nor the exit of another worker."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.ops.worker_link import (
    ChangeMessage,
    WorkerExited,
    WorkerLink,
    WorkerMessage,
    decode_message,
    encode_message,
)
from mooncake_proxy.ops.worker_processes import WorkerSupervisor
from mooncake_proxy.pool.instances import Role
from mooncake_proxy.pool.membership import ChangeOperation, MembershipChange
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
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    yield ends
    for end in ends:
        end.close()


def test_late_worker_receives_all_missed_changes(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    flags = ["--prefill", "http://p:1", "--decode", "http://d:1", "--port", "0", "--workers", "2"]
    supervisor = WorkerSupervisor(config_from(build_parser().parse_args(flags)), lambda *_: None)
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
    for each in (first, firsts, supervisor._reserved):
        each.close()


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
