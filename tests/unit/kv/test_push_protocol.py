"""Both sides of a push when messages are lost and either side dies; in virtual time.

Blocks on both sides are freed once nothing writes to them, whichever messages are lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.push_line import (
    LOAD_S,
    NUM_TOKENS,
    TOKEN,
    TOKEN_BYTES,
    Pair,
    deliver,
    dropping,
    unreliable,
)
from support.virtual_time import run_virtually

from mooncake_kv.connector import LoadEnded
from mooncake_kv.params import FirstToken

FIRST = FirstToken(TOKEN.token_id, None, 0)
Scenario = Callable[[Pair], Coroutine[Any, Any, None]]


def run_on_pair(
    scenario: Scenario, seed: int = 0, lease_s: tuple[float, float] = (6.0, 6.0)
) -> None:
    async def main() -> None:
        pair = Pair(random.Random(seed), lease_s)
        pair.start()
        await scenario(pair)
        pair.tasks.check()

    run_virtually(main())


async def push(pair: Pair, name: str = "r") -> None:
    """Run a whole prompt on the prefill side."""
    pair.load(name)
    pair.begin(name)
    await asyncio.sleep(1.0)
    pair.complete(name)


def test_push_ends_once_on_both_sides() -> None:
    async def scenario(pair: Pair) -> None:
        await push(pair)
        await asyncio.sleep(2.0)
        assert pair.ended["r"] == [LoadEnded("r", None, FIRST)]
        assert pair.freed["p-r"]
        assert pair.d.num_reserved == pair.p.num_sending == 0
        assert "StatusRequest" not in pair.asked

    run_on_pair(scenario)


def test_push_is_counted_before_its_blocks_are_freed() -> None:
    """vLLM reads the counters in the step that frees the blocks; after it, an idle one has none."""

    async def scenario(pair: Pair) -> None:
        await push(pair)
        await asyncio.sleep(2.0)
        assert pair.counted == {"p-r": NUM_TOKENS * TOKEN_BYTES}

    run_on_pair(scenario)


@pytest.mark.parametrize("lost", [("Pushed",), ("Pushed", "Renew")], ids=str)
def test_completion_lost_on_all_retries_is_requested(lost: tuple[str, ...]) -> None:
    """The writer is alive, but its messages are lost: the reader asks, and even gets its KV."""

    async def scenario(pair: Pair) -> None:
        pair.line.delivery = dropping(*lost)
        await push(pair)
        await asyncio.sleep(30.0)
        assert pair.ended["r"] == [LoadEnded("r", None, FIRST)]
        assert pair.d.num_reserved == pair.p.num_sending == 0

    run_on_pair(scenario)


def test_forgotten_writer_sends_hello_again() -> None:
    """The reader has evicted the writer, which still knows the reader."""

    async def scenario(pair: Pair) -> None:
        await push(pair, "first")
        await asyncio.sleep(2.0)
        pair.d._writers.clear()
        await push(pair, "second")
        await asyncio.sleep(2.0)
        assert pair.ended["second"] == [LoadEnded("second", None, FIRST)]
        assert pair.asked.count("Hello") == 2
        await push(pair, "third")
        await asyncio.sleep(2.0)
        assert pair.asked.count("Hello") == 2

    run_on_pair(scenario)


def test_failure_lost_on_all_retries_is_requested() -> None:
    async def scenario(pair: Pair) -> None:
        pair.line.delivery = dropping("PushFailed", "Renew")
        pair.load("r")
        pair.begin("r")
        await asyncio.sleep(1.0)
        pair.p.cancel("p-r")
        await asyncio.sleep(30.0)
        [ended] = pair.ended["r"]
        assert ended.is_drained
        assert "gave up: the request ended before its prefill" in str(ended.error)

    run_on_pair(scenario)


@pytest.mark.parametrize("has_failed", [False, True])
def test_push_whose_request_ended_is_no_failure_unless_it_had_failed(
    caplog: pytest.LogCaptureFixture, has_failed: bool
) -> None:
    async def scenario(pair: Pair) -> None:
        pair.load("r")
        pair.begin("r")
        await asyncio.sleep(1.0)
        if has_failed:
            pair.p.abort("p-r", "broken")
        pair.p.cancel("p-r")
        await asyncio.sleep(1.0)
        assert [ended.is_drained for ended in pair.ended["r"]] == [True]
        assert (pair.p.counts.transfers, pair.p.counts.failures) == (1, int(has_failed))
        assert (pair.p.counts.nbytes, pair.p.counts.seconds) == (0, 0.0), "of successful pushes"
        assert ("pushing p-r failed" in caplog.text) == has_failed

    run_on_pair(scenario)


def test_push_forgotten_by_writer_fails() -> None:
    """All messages are lost for longer than the writer remembers the results of its pushes."""

    async def scenario(pair: Pair) -> None:
        pair.load("r")
        pair.begin("r")
        await asyncio.sleep(1.0)
        pair.line.is_cut = True
        pair.complete("r")
        await asyncio.sleep(60.0)
        [given_up] = pair.ended["r"]
        assert not given_up.is_drained
        assert pair.d.num_reserved == 1
        assert pair.p.num_sending == 0
        pair.line.is_cut = False
        await asyncio.sleep(10.0)
        assert [ended.is_drained for ended in pair.ended["r"]] == [False, True]
        assert "has no record of it any more" in str(pair.ended["r"][-1].error)
        assert pair.d.num_reserved == 0

    run_on_pair(scenario)


def test_push_in_flight_is_awaited() -> None:
    """The writer's keepalives are lost, but its replies are not."""

    async def scenario(pair: Pair) -> None:
        pair.line.delivery = dropping("Renew")
        pair.load("r")
        pair.begin("r")
        await asyncio.sleep(5.0)
        assert "StatusRequest" in pair.asked
        assert not pair.ended["r"]
        pair.complete("r")
        await asyncio.sleep(2.0)
        assert pair.ended["r"] == [LoadEnded("r", None, FIRST)]

    run_on_pair(scenario)


@pytest.mark.parametrize("lease_s", [(60.0, 1.0), (1.0, 60.0)], ids=["reader", "writer"])
def test_keepalive_interval_follows_shorter_lease(
    lease_s: tuple[float, float],
) -> None:
    async def scenario(pair: Pair) -> None:
        await asyncio.sleep(7.3)
        pair.load("r")
        pair.begin("r")
        await asyncio.sleep(20.0)
        assert pair.asked.count("Renew") >= 100
        assert "StatusRequest" not in pair.asked
        pair.complete("r")
        await asyncio.sleep(2.0)
        assert pair.ended["r"] == [LoadEnded("r", None, FIRST)]

    run_on_pair(scenario, lease_s=lease_s)


def test_reservation_granted_after_writer_aborted_is_released() -> None:
    """Late and repeated messages arrive in any order."""

    async def scenario(pair: Pair) -> None:
        pair.line.delivery = lambda kind: {"PushOpen": 40.0, "PushFailed": None}.get(kind, 0.0)
        pair.load("r")
        pair.begin("r")
        await asyncio.sleep(1.0)
        pair.complete("r")
        await asyncio.sleep(80.0)
        assert [ended.is_drained for ended in pair.ended["r"]] == [True]
        assert pair.d.num_reserved == pair.p.num_sending == 0

    run_on_pair(scenario, lease_s=(6.0, 60.0))


def test_writer_considered_dead_stops_before_its_blocks_are_freed() -> None:
    """A middlebox refuses connections in the writer's name and drops its messages, while the writer
    lives and writes."""

    async def scenario(pair: Pair) -> None:
        pair.load("r")
        pair.begin("r")
        await asyncio.sleep(1.0)
        pair.is_p_hidden = pair.line.is_cut = True
        await asyncio.sleep(5.0)
        assert [ended.is_drained for ended in pair.ended["r"]] == [False]
        assert pair.rank.writing == {"p-r"}
        await asyncio.sleep(12.0)
        assert [ended.is_drained for ended in pair.ended["r"]] == [False, True]
        assert pair.d.num_reserved == 0

    run_on_pair(scenario, lease_s=(60.0, 6.0))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    loses=st.booleans(),
    kills=st.booleans(),
    hides=st.booleans(),
    lease_s=st.sampled_from([(6.0, 6.0), (6.0, 1.0), (1.0, 6.0), (60.0, 6.0)]),
)
def test_both_sides_free_everything_despite_lost_messages(
    seed: int, lease_s: tuple[float, float], *, loses: bool, kills: bool, hides: bool
) -> None:
    """Requests arrive, complete, are aborted and cancelled at any moment; then no message is
    lost."""

    async def scenario(pair: Pair) -> None:
        if loses:
            pair.line.delivery = unreliable(seed)
        pair.is_p_hidden = hides
        names = [f"r{index}" for index in range(8)]
        await asyncio.gather(*(_live(pair, name) for name in names))
        if kills:
            pair.kill_p()
        pair.line.delivery = deliver
        await asyncio.sleep(LOAD_S / 4)
        assert pair.d.num_reserved == 0
        assert kills or pair.p.num_sending == 0
        assert all(_ended_once(pair.ended[name]) for name in names), pair.ended

    run_on_pair(scenario, seed, lease_s)


async def _live(pair: Pair, name: str) -> None:
    numbers = pair.numbers
    await asyncio.sleep(numbers.uniform(0.0, 20.0))
    pair.load(name)
    await asyncio.sleep(numbers.uniform(0.0, 3.0))
    if numbers.random() < 0.2:
        pair.d.cancel(name)
    if numbers.random() < 0.9:
        pair.begin(name)
        await asyncio.sleep(numbers.uniform(0.0, 8.0))
        if numbers.random() < 0.2:
            pair.d.cancel(name)
        is_completed = numbers.random() < 0.8
        if is_completed:
            pair.complete(name)
            await asyncio.sleep(numbers.uniform(0.0, 2.0))
        if not is_completed or numbers.random() < 0.3:
            pair.p.cancel(f"p-{name}")


def _ended_once(events: list[LoadEnded]) -> bool:
    """Check that each request is drained once in the end, and aborted at most once before that."""
    return [event.is_drained for event in events] in ([True], [False, True])
