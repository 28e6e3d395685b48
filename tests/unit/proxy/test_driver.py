"""Coroutines without a task: every wake-up and every cancellation arrives, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mooncake_proxy.http1.driver import Bell, Driver

Ends = list[BaseException | None]


def drive(coroutine: Coroutine[Any, Any, None]) -> tuple[Driver, Ends]:
    """A driver that has taken its first step, and where its end will be written."""
    ends: Ends = []
    driver = Driver(asyncio.get_running_loop(), coroutine, ends.append)
    driver.step()
    return driver, ends


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def test_it_runs_until_the_bell_and_goes_on_inside_the_ring() -> None:
    async def scenario() -> None:
        bell, heard = Bell(asyncio.get_running_loop()), []

        async def listen() -> None:
            for turn in range(3):
                await bell
                heard.append(turn)

        _, ends = drive(listen())
        for turn in range(3):
            assert heard == list(range(turn))
            assert not ends
            bell.ring()
        assert heard == [0, 1, 2]
        assert ends == [None]
        bell.ring()  # nobody is there any more

    run(scenario)


def test_a_failure_is_its_end() -> None:
    async def scenario() -> None:
        async def fail() -> None:
            raise ValueError("mine")

        _, ends = drive(fail())
        assert [str(end) for end in ends] == ["mine"]

    run(scenario)


def test_it_waits_for_futures_and_bare_yields_too() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        got = []

        async def wait() -> None:
            got.append(await future)
            await asyncio.sleep(0)
            got.append("after")

        _, ends = drive(wait())
        future.set_result("result")
        assert got == []
        await asyncio.sleep(0)
        assert got == ["result"]
        await asyncio.sleep(0)
        assert got == ["result", "after"]
        assert ends == [None]

    run(scenario)


@pytest.mark.parametrize("has_rung", [False, True])
def test_a_cancellation_at_a_bell_is_raised_at_once(has_rung: bool) -> None:
    async def scenario() -> None:
        bell, cleaned = Bell(asyncio.get_running_loop()), []

        async def listen() -> None:
            try:
                await bell
                await bell
            finally:
                cleaned.append(True)

        driver, ends = drive(listen())
        if has_rung:
            bell.ring()
        driver.cancel()
        assert cleaned == [True]
        assert [type(end) for end in ends] == [asyncio.CancelledError]
        bell.ring()

    run(scenario)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_cancellation_beside_the_result_of_a_future_is_not_lost(is_done: bool) -> None:
    """The gap in which asyncio.wait_for lost it: the result is there, its waiter not yet awake."""

    async def scenario() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        went_on = []

        async def wait() -> None:
            await future
            went_on.append(True)

        driver, ends = drive(wait())
        if is_done:
            future.set_result(None)
        driver.cancel()
        await asyncio.sleep(0)
        assert not went_on
        assert [type(end) for end in ends] == [asyncio.CancelledError]

    run(scenario)


def test_who_handles_a_cancellation_may_still_wait() -> None:
    async def scenario() -> None:
        bell = Bell(asyncio.get_running_loop())
        seen = []

        async def stubborn() -> None:
            try:
                await bell
            except asyncio.CancelledError:
                await bell
                seen.append("cleaned up")
                raise

        driver, ends = drive(stubborn())
        driver.cancel()
        assert not ends
        bell.ring()
        assert seen == ["cleaned up"]
        assert [type(end) for end in ends] == [asyncio.CancelledError]

    run(scenario)


@pytest.mark.parametrize("has_rung", [False, True])
def test_tasks_hear_bells_too_and_are_cancelled_at_them(has_rung: bool) -> None:
    async def scenario() -> None:
        bell = Bell(asyncio.get_running_loop())

        async def listen() -> None:
            await bell

        task = asyncio.ensure_future(listen())
        await asyncio.sleep(0)
        bell.ring()
        await task
        task = asyncio.ensure_future(listen())
        await asyncio.sleep(0)
        if has_rung:
            bell.ring()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # A driver may be the next to wait at the same bell.
        _, ends = drive(listen())
        bell.ring_soon()
        await asyncio.sleep(0)
        assert ends == [None]

    run(scenario)
