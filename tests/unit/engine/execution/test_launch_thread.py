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
"""Numbers of a step whose launch the test holds, and of a step whose launch fails."""


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


def test_result_is_returned_after_the_next_step_is_launched(
    launches: _LaunchThread, may_launch: threading.Event
) -> None:
    first, held = [launches.submit(StepPlan(step), lambda wait: wait()) for step in (0, HELD)]
    with ThreadPoolExecutor(1) as caller:
        result_future = caller.submit(first.result)
        with pytest.raises(TimeoutError):
            result_future.result(timeout=0.1)
        may_launch.set()
        assert result_future.result(timeout=10).step == 0
    assert held.result().step == HELD, "no step follows it"


def test_failed_launch_does_not_delay_other_results(launches: _LaunchThread) -> None:
    first, broken = [launches.submit(StepPlan(step), lambda wait: wait()) for step in (0, BROKEN)]
    assert first.result().step == 0
    with pytest.raises(ValueError, match="no such step"):
        broken.result()
