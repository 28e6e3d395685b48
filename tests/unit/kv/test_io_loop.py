"""The asyncio loop of connectors and store clients ends its tasks before it closes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mooncake_kv.errors import ConnectorDead
from mooncake_kv.io_loop import IoLoop

WAIT_S = 30.0


def test_tasks_end_if_loop_that_ended_by_itself_is_stopped_once_more() -> None:
    """As ``close`` stops it, in the middle of the cancellation of a task."""
    failures: list[ConnectorDead] = []
    is_running, has_ended = threading.Event(), threading.Event()
    io_loop = IoLoop("test", lambda *_: None, failures.append)
    loop = io_loop._loop

    async def task() -> None:
        try:
            is_running.set()
            await asyncio.sleep(WAIT_S)
        finally:
            loop.stop()
            await asyncio.sleep(0.01)
            has_ended.set()

    io_loop.call("", lambda: io_loop.spawn(task()) and None)
    assert is_running.wait(WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    assert has_ended.wait(WAIT_S)
    io_loop._thread.join(WAIT_S)
    assert loop.is_closed()
    assert len(failures) == 1
    io_loop.close()


def test_calls_after_close_are_dropped_and_after_a_death_are_refused() -> None:
    """A rank may report what it was ordered before the close."""
    failures: list[ConnectorDead] = []
    closed, dead = (IoLoop("test", lambda *_: None, failures.append) for _ in range(2))
    closed.close()
    closed.call("", pytest.fail)
    dead._loop.call_soon_threadsafe(dead._loop.stop)
    dead._thread.join(WAIT_S)
    assert len(failures) == 1
    with pytest.raises(RuntimeError, match="closed"):
        dead.call("", pytest.fail)
    dead.close()
