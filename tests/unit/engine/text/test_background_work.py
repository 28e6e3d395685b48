"""Background work: queues are bounded, and short work does not wait for long work."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest

from mooncake_engine.errors import InvalidRequest, Overloaded
from mooncake_engine.text.background_work import (
    LONG_TEXT,
    LONGEST_TEXTS,
    BackgroundWork,
    BoundedExecutor,
)


def waiting_for(event: threading.Event) -> Callable[[], str]:
    def work() -> str:
        assert event.wait(30), "the event was never set"
        return threading.current_thread().name

    return work


def test_a_short_text_runs_on_the_event_loop() -> None:
    async def scenario() -> None:
        name = await BackgroundWork().on_text(LONG_TEXT, lambda: threading.current_thread().name)
        assert name == threading.current_thread().name

    asyncio.run(scenario())


def test_each_size_has_its_own_executor() -> None:
    async def scenario() -> None:
        work, event = BackgroundWork(), threading.Event()
        longest = asyncio.create_task(work.on_text(LONGEST_TEXTS + 1, waiting_for(event)))
        compiling = asyncio.create_task(work.grammars.run(waiting_for(event)))
        await asyncio.sleep(0)  # both executors are busy
        name = await work.on_text(LONG_TEXT + 1, lambda: threading.current_thread().name)
        assert name.startswith("long-texts")
        event.set()
        assert (await longest).startswith("very-long-texts")
        assert (await compiling).startswith("grammars")

    asyncio.run(scenario())


def test_a_full_queue_rejects_until_a_call_has_finished() -> None:
    async def scenario() -> None:
        executor, event = BoundedExecutor("long texts", 1, 2), threading.Event()
        tasks = [asyncio.create_task(executor.run(waiting_for(event))) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"too many long texts are queued \(3\)"):
            await executor.run(lambda: None)
        event.set()
        await asyncio.gather(*tasks)
        assert await executor.run(lambda: 7) == 7

    asyncio.run(scenario())


def test_a_cancelled_call_leaves_the_queue_and_never_runs() -> None:
    async def scenario() -> None:
        executor, event = BoundedExecutor("long texts", 1, 1), threading.Event()
        done: list[int] = []
        first = asyncio.create_task(executor.run(waiting_for(event)))
        second = asyncio.create_task(executor.run(lambda: done.append(2)))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        third = asyncio.create_task(executor.run(lambda: done.append(3)))
        await asyncio.sleep(0)
        event.set()
        await asyncio.gather(first, third)
        assert done == [3]

    asyncio.run(scenario())


def test_a_running_call_that_is_cancelled_counts_until_it_has_ended() -> None:
    async def scenario() -> None:
        executor = BoundedExecutor("long texts", 1, 0)
        begun, event = threading.Event(), threading.Event()
        first = asyncio.create_task(executor.run(lambda: (begun.set(), event.wait(30))))
        assert await asyncio.to_thread(begun.wait, 30)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(Overloaded):
            await executor.run(lambda: None)
        event.set()
        while True:  # until the thread has noted the end
            with suppress(Overloaded):
                assert await executor.run(lambda: 7) == 7
                return
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_a_cancelled_call_frees_its_text_at_once() -> None:
    class Work:
        def __call__(self) -> None:
            raise AssertionError("a cancelled call has run")

    async def scenario() -> None:
        executor, event = BoundedExecutor("long texts", 1, 1), threading.Event()
        first = asyncio.create_task(executor.run(waiting_for(event)))
        await asyncio.sleep(0)
        work = Work()
        kept = weakref.ref(work)
        second = asyncio.create_task(executor.run(work))
        del work
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        del second
        is_kept = kept() is not None
        event.set()
        await first
        assert not is_kept

    asyncio.run(scenario())


def test_errors_are_raised_to_the_caller() -> None:
    def refuse() -> None:
        raise InvalidRequest("no")

    async def scenario() -> None:
        executor = BoundedExecutor("long texts", 1, 0)
        for _ in range(3):
            with pytest.raises(InvalidRequest, match="no"):
                await executor.run(refuse)

    asyncio.run(scenario())
