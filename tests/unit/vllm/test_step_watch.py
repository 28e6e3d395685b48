"""The step watchdog distinguishes a step without results from an idle instance."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mooncake_vllm.vllm_scheduler_base import StepWatch

LIMIT_S = 150.0


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> StepWatch:
    return StepWatch(LIMIT_S, clock)


def test_step_that_does_not_return_stalls_after_the_limit_until_it_does(
    watch: StepWatch, clock: Clock
) -> None:
    watch.begin()
    clock.now += LIMIT_S
    assert not watch.has_stalled()
    clock.now += 1.0
    assert watch.has_stalled()
    watch.end()
    assert not watch.has_stalled()


def test_without_requests_no_step_begins_and_nothing_stalls(watch: StepWatch, clock: Clock) -> None:
    clock.now += 10 * LIMIT_S
    assert not watch.has_stalled()
    watch.begin()
    watch.end()
    clock.now += 10 * LIMIT_S
    assert not watch.has_stalled()
    watch.begin()
    assert not watch.has_stalled(), "it is new"


@pytest.mark.parametrize("heard", [StepWatch.begin, StepWatch.end], ids=["begins", "ends"])
def test_steps_that_make_progress_do_not_stall(
    watch: StepWatch, clock: Clock, heard: Callable[[StepWatch], None]
) -> None:
    """vLLM has several in flight, and waits for the first."""
    for _ in range(3):
        watch.begin()
    for _ in range(2):
        clock.now += LIMIT_S - 1.0
        heard(watch)
        assert not watch.has_stalled()
    clock.now += LIMIT_S + 1.0
    assert watch.has_stalled()


def test_time_without_step_counts_from_the_latest_request_or_result(
    watch: StepWatch, clock: Clock
) -> None:
    clock.now += LIMIT_S
    watch.arrive()
    assert watch.seconds_without_step() == 0
    clock.now += 1.0
    assert watch.seconds_without_step() == 1.0
    watch.begin()
    clock.now += LIMIT_S
    assert watch.seconds_without_step() == 0, "a step may take long"
    watch.end()
    clock.now += 2.0
    assert watch.seconds_without_step() == 2.0


def test_results_without_a_begun_step_do_not_hide_a_later_stall(
    watch: StepWatch, clock: Clock
) -> None:
    watch.end()
    watch.begin()
    clock.now += LIMIT_S + 1.0
    assert watch.has_stalled()
