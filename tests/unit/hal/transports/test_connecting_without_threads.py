"""A connection that fails because no thread can be started leaks nothing."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack

import pytest

from mooncake_hal.errors import TransferError
from mooncake_hal.testing.transports import one_span
from mooncake_hal.testing.transports_buffers import Buffer, load_transport, resolve
from mooncake_hal.transport import EndpointOptions, Peer

ANONYMOUS = "mooncake_hal.testing.transports_buffers:anonymous"
STAGED = "support.host_device:load_staged_over_tcp"


def held() -> tuple[int, int]:
    """Return the numbers of threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("loader", "allocator", "device", "thread"),
    [
        ("tcp", ANONYMOUS, "cpu", "mooncake-tcp-connection-0"),
        ("tcp", ANONYMOUS, "cpu", "mooncake-tcp-connection-1"),
        ("shm", ANONYMOUS, "cpu", "shm-session"),
        ("support.adapter_engine:load", ANONYMOUS, "cpu", "copying-slices"),
        (STAGED, "support.host_device:allocate", "test:0", "mooncake-tcp-connection-0"),
        (STAGED, "support.host_device:allocate", "test:0", "device-copy"),
    ],
)
def test_failed_connection_leaks_no_threads_or_descriptors(
    loader: str, allocator: str, device: str, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a load is retried: leaks would turn a temporary shortage into a permanent one."""
    real, shortages = threading.Thread.start, []

    def start(starting: threading.Thread) -> None:
        if starting.name == thread and shortages:
            raise shortages.pop()
        real(starting)

    monkeypatch.setattr(threading.Thread, "start", start)
    with ExitStack() as stack:
        transport = load_transport(loader)
        options = EndpointOptions(secret=b"few threads", device=device, connections=2)
        far, near = transport.open(options), transport.open(options)
        buffers = here, there = [resolve(allocator)(4096) for _ in range(2)]
        for each in (*buffers, far, near):
            stack.callback(each.close)
        far.register(there.region)
        near.register(here.region)
        check(near.connect(far.address, timeout=5), here, there)
        before = held()
        for _ in range(3):
            shortages.append(RuntimeError("can't start new thread"))
            with pytest.raises(TransferError, match="thread can't be started: can't start new"):
                near.connect(far.address, timeout=5)
        deadline = time.monotonic() + 10
        while held() != before:
            assert time.monotonic() < deadline, (
                f"{held()} threads and descriptors remain of {before} before"
            )
            time.sleep(0.01)
        check(near.connect(far.address, timeout=5), here, there)


@pytest.mark.parametrize(
    ("name", "thread"),
    [("tcp", "tcp-listener"), ("shm", "shm-listener"), ("shm", "mooncake-shm-copy-0")],
)
def test_endpoint_without_threads_is_refused_and_leaks_nothing(
    name: str, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threading.Thread.start

    def start(starting: threading.Thread) -> None:
        if starting.name == thread:
            raise RuntimeError("can't start new thread")
        real(starting)

    transport = load_transport(name)
    options = EndpointOptions(secret=b"few threads")
    transport.open(options).close()
    before = held()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(TransferError, match="thread can't be started: can't start new"):
            transport.open(options)
    assert held() == before
    transport.open(options).close()


def check(peer: Peer, here: Buffer, there: Buffer) -> None:
    """Check that the peer reads correctly."""
    spans = one_span(here.region.address, there.region.address, 4096)
    peer.read(spans, timeout=5).wait()
    assert (here.get() == there.get()).all()
