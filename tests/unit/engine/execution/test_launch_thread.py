"""Steps are launched in a thread, and a result is returned after the next step is launched."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_engine.execution.executor import _LaunchThread
from mooncake_engine.execution.model_runner import CompletedStep, PendingStep
from mooncake_engine.scheduling.step_plan import StepPlan, StepResult

HELD, BROKEN = 1, 2
"""Steps that are launched when the test lets them, and not at all."""


@pytest.fixture
def may_launch() -> threading.Event:
    return threading.Event()


@pytest.fixture
def launches(may_launch: threading.Event) -> Iterator[_LaunchThread]:
    def launch(plan: StepPlan) -> PendingStep:
        if plan.step == HELD:
            assert may_launch.wait(10)
        if plan.step == BROKEN:
            raise ValueError("no such step")
        return CompletedStep(StepResult(plan.step, {}))

    thread = _LaunchThread(launch, lambda: None)
    yield thread
    may_launch.set()
    thread.close()


def test_a_result_is_returned_after_the_next_step_is_launched(
    launches: _LaunchThread, may_launch: threading.Event
) -> None:
    first, held = [launches.submit(StepPlan(step), lambda wait: wait()) for step in (0, HELD)]
    with ThreadPoolExecutor(1) as caller:
        told = caller.submit(first.result)
        with pytest.raises(TimeoutError):
            told.result(timeout=0.1)
        may_launch.set()
        assert told.result(timeout=10).step == 0
    assert held.result().step == HELD, "there is none behind it"


def test_a_step_that_can_not_be_launched_holds_up_no_result(launches: _LaunchThread) -> None:
    first, broken = [launches.submit(StepPlan(step), lambda wait: wait()) for step in (0, BROKEN)]
    assert first.result().step == 0
    with pytest.raises(ValueError, match="no such step"):
        broken.result()
