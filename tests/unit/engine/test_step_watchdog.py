"""A step that does not return is noticed; a slow one, or a process that stood still, is not taken
for one."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.scripted_core import ScriptedExecutor, scripted_engine

from mooncake_engine.async_engine import AsyncEngine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.errors import ConfigError, EngineDead, EngineStalled, EngineStuck
from mooncake_engine.execution.model_runner import CompletedStep
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_engine.step_watchdog import StepWatch

PATIENCE_S = 60.0


def look(watch: StepWatch, first: float, last: float) -> bool:
    """Look as often as the watchdog does; what the last look found."""
    now, found = first, False
    while now <= last:
        found = watch.look(now)
        now += watch.pause_s
    return found


def test_a_step_is_stalled_at_half_of_the_limit_and_given_up_at_the_limit() -> None:
    watch = StepWatch(20.0)
    watch.begin()
    assert not look(watch, 0.0, 10.0)
    assert not watch.has_stalled()
    assert not look(watch, 11.0, 20.0)
    assert watch.has_stalled()
    assert watch.look(21.0)


def test_the_next_step_starts_afresh() -> None:
    watch = StepWatch(20.0)
    watch.begin()
    look(watch, 0.0, 19.0)
    assert watch.has_stalled()
    watch.end()
    assert not watch.has_stalled()
    watch.begin()
    assert not watch.has_stalled()
    assert not look(watch, 20.0, 38.0)


def test_between_steps_no_time_passes() -> None:
    """A caller of ``LLMEngine`` steps when it pleases."""
    watch = StepWatch(20.0)
    watch.begin()
    watch.end()
    assert not look(watch, 0.0, 1000.0)


def test_time_in_which_the_process_stood_still_does_not_count() -> None:
    watch = StepWatch(20.0)
    watch.begin()
    watch.look(0.0)
    watch.look(1.0)
    assert not watch.look(100_000.0)
    assert watch.watched_s == pytest.approx(3.0)


def test_without_a_limit_nothing_is_stuck() -> None:
    watch = StepWatch(0.0)
    watch.begin()
    assert not watch.look(0.0)
    assert not watch.look(1e9)
    assert not watch.has_stalled()


@pytest.mark.parametrize("seconds", [-1.0, 0.5, 1e9])
def test_a_limit_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="step_timeout_s must be 0"):
        EngineConfig(Path("model"), step_timeout_s=seconds)


@dataclass
class HangingExecutor(ScriptedExecutor):
    """Its steps don't return before ``release`` is set; ``abandon`` sets it if the step can be made
    to fail."""

    can_be_ended: bool = True
    release: threading.Event = field(default_factory=threading.Event)
    died: EngineDead | None = None

    def submit(self, plan: StepPlan) -> CompletedStep:
        if not plan.sequences:
            return super().submit(plan)
        self.release.wait(PATIENCE_S)
        raise self.died or EngineDead("released too late")

    def abandon(self, reason: str) -> EngineDead:
        if not self.can_be_ended:
            return EngineStuck(reason)
        self.died = EngineDead(f"{reason}; no answer from rank 1 of 2")
        self.release.set()
        return self.died


def engine_over(executor: HangingExecutor) -> AsyncEngine:
    """An engine whose steps may take a fifth of a second."""
    built = scripted_engine(executor)
    core: EngineCore = built.core
    core.watch = StepWatch(0.2)
    return AsyncEngine(core, built.info, EngineConfig(Path("model")))


async def first_update(engine: AsyncEngine) -> None:
    sampling = SamplingParams(max_tokens=4)
    async for _ in engine.generate(EngineRequest("a", (1, 2, 3), sampling)):
        return


def test_requests_hear_why_a_step_was_given_up_and_who_did_not_answer() -> None:
    engine = engine_over(HangingExecutor())
    with pytest.raises(EngineDead, match=r"within 0\.2 s.*no answer from rank 1 of 2"):
        asyncio.run(asyncio.wait_for(first_update(engine), PATIENCE_S))
    with pytest.raises(EngineDead, match="no answer from rank 1"):
        engine.check_ready()
    engine.close()


def test_an_engine_whose_step_can_not_be_ended_is_dead_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its requests fail and its health is red, though the thread hangs; the log says where."""
    executor = HangingExecutor(can_be_ended=False)
    engine = engine_over(executor)
    with pytest.raises(EngineStuck):
        asyncio.run(asyncio.wait_for(first_update(engine), PATIENCE_S))
    with pytest.raises(EngineStuck):
        engine.check_health()
    assert "self.release.wait(PATIENCE_S)" in caplog.text
    executor.release.set()
    engine.close()


def test_a_stalled_engine_takes_no_requests() -> None:
    engine = engine_over(HangingExecutor())
    core = engine._core
    core.watch = StepWatch(1000.0)
    core.watch.begin()
    look(core.watch, 0.0, 600.0)
    with pytest.raises(EngineStalled, match="a step has been running for"):
        engine.check_ready()
    engine.check_health()
    with pytest.raises(EngineStalled):
        asyncio.run(asyncio.wait_for(first_update(engine), PATIENCE_S))
    core.watch.end()
    engine.close()
