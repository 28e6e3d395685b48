"""Time in which the proxy's process was stopped counts against nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_proxy.errors import UpstreamTimeout
from mooncake_proxy.http1.connection_pool import ConnectionPool
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.server_connection import ServerContext, ServerProtocol
from mooncake_proxy.http1.upstream_connection import (
    ClientContext,
    ClientLimits,
    UpstreamConnection,
)
from mooncake_proxy.ops.sweep import SWEEP_INTERVAL_S, Sweep


class Clock:
    """A loop whose time the test sets."""

    now = 1000.0

    def time(self) -> float:
        return self.now

    def create_future(self) -> Any:
        return SimpleNamespace(done=lambda: False, set_result=lambda _: None)


class Transport:
    """A connection without a peer."""

    def __init__(self) -> None:
        self.is_aborted = False

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.is_aborted = True

    close = abort

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> None:
        return None


class Bench:
    """A request in flight on an instance, an idle client, and leases."""

    def __init__(self, *, deadline_s: float = 1e6) -> None:
        self.clock: Any = Clock()
        client = ClientContext(ClientLimits(first_byte_timeout_s=30.0), loop=self.clock)
        self.upstream = UpstreamConnection(ConnectionPool(Origin("http", "d", 1), client))
        self.upstream.connection_made(Transport())  # type: ignore[arg-type]
        self.upstream.send(b"", self.clock.now + deadline_s, await_body=True)
        server = ServerContext(lambda _: asyncio.sleep(0), loop=self.clock)
        self.idle = Transport()
        ServerProtocol(server).connection_made(self.idle)  # type: ignore[arg-type]
        self.postponed: list[float] = []
        self.num_expiries = 0
        process = SimpleNamespace(
            router=SimpleNamespace(client=client, now=self.clock.time), registrations=self
        )
        self._sweep = Sweep(process, server.connections, Any, Any)  # type: ignore[arg-type]

    def postpone_expiry(self, stopped_s: float) -> None:
        self.postponed.append(stopped_s)

    def expire(self) -> None:
        self.num_expiries += 1

    def turn(self, after_s: float = SWEEP_INTERVAL_S) -> None:
        self.clock.now += after_s
        self._sweep.enforce_timeouts(self.clock.now)

    def failure(self) -> object:
        return self.upstream._failure


def test_pause_of_the_process_is_nobodys_silence(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.turn(200.0 + SWEEP_INTERVAL_S)
    assert bench.num_expiries == 0, "renewals may lie unread in the sockets"
    for _ in range(int(30.0 / SWEEP_INTERVAL_S) - 1):
        bench.turn()
    assert bench.failure() is None
    assert not bench.idle.is_aborted
    assert bench.postponed == [200.0]
    assert "stopped or blocked for 200.0 s" in caplog.text


def test_silence_before_and_after_a_pause_counts() -> None:
    bench = Bench()
    for _ in range(40):
        bench.turn()
    bench.turn(200.0)
    for _ in range(79):
        bench.turn()
    assert bench.failure() is None
    bench.turn()
    assert isinstance(bench.failure(), UpstreamTimeout)
    for _ in range(180):
        bench.turn()
    assert bench.idle.is_aborted, "75 s without a request"


def test_deadlines_are_not_moved_but_come_after_a_read() -> None:
    bench = Bench(deadline_s=10.0)
    bench.turn(200.0)
    assert bench.failure() is None, "the response may have arrived"
    bench.turn()
    assert "deadline" in str(bench.failure())


def test_turns_that_are_a_little_late_count_in_full() -> None:
    bench = Bench()
    for _ in range(31):
        bench.turn(1.0)
    assert isinstance(bench.failure(), UpstreamTimeout)
    assert bench.postponed == []
