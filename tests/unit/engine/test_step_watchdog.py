"""The watchdog detects a step that hangs, and does not mistake a slow step or a suspended process
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
from mooncake_engine.core_messages import Command, ResetPrefixCache
from mooncake_engine.errors import ConfigError, EngineDead, EngineStalled, EngineStuck
from mooncake_engine.execution.model_runner import CompletedStep
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_engine.step_watchdog import StepWatch

TEST_TIMEOUT_S = 60.0


def check(watch: StepWatch, first: float, last: float) -> bool:
    """Check at the watchdog's interval from ``first`` to ``last``; return the last result."""
    now, found = first, False
    while now <= last:
        found = watch.check(now)
        now += watch.pause_s
    return found


def test_step_is_stalled_at_half_the_timeout_and_abandoned_at_the_timeout() -> None:
    watch = StepWatch(20.0)
    watch.begin()
    assert not check(watch, 0.0, 10.0)
    assert not watch.has_stalled()
    assert not check(watch, 11.0, 20.0)
    assert watch.has_stalled()
    assert watch.check(21.0)


def test_next_step_restarts_the_clock() -> None:
    watch = StepWatch(20.0)
    watch.begin()
    check(watch, 0.0, 19.0)
    assert watch.has_stalled()
    watch.end()
    assert not watch.has_stalled()
    watch.begin()
    assert not watch.has_stalled()
    assert not check(watch, 20.0, 38.0)


def test_time_between_steps_does_not_count() -> None:
    """A caller of ``LLMEngine`` may pause between steps."""
    watch = StepWatch(20.0)
    watch.begin()
    watch.end()
    assert not check(watch, 0.0, 1000.0)


def test_time_while_the_process_was_suspended_does_not_count() -> None:
    watch = StepWatch(20.0)
    watch.begin()
    watch.check(0.0)
    watch.check(1.0)
    assert not watch.check(100_000.0)
    assert watch.watched_s == pytest.approx(3.0)


def test_timeout_of_zero_disables_the_watchdog() -> None:
    watch = StepWatch(0.0)
    watch.begin()
    assert not watch.check(0.0)
    assert not watch.check(1e9)
    assert not watch.has_stalled()


@pytest.mark.parametrize("seconds", [-1.0, 0.5, 1e9])
def test_invalid_timeout_is_rejected(seconds: float) -> None:
    with pytest.raises(ConfigError, match="step_timeout_s must be 0"):
        EngineConfig(Path("model"), step_timeout_s=seconds)


@dataclass
class HangingExecutor(ScriptedExecutor):
    """An executor whose steps block until ``release`` is set; ``abandon`` sets it if
    ``can_be_ended``."""

    can_be_ended: bool = True
    release: threading.Event = field(default_factory=threading.Event)
    died: EngineDead | None = None

    def execute_model(self, plan: StepPlan) -> CompletedStep:
        if not plan.sequences:
            return super().execute_model(plan)
        self.release.wait(TEST_TIMEOUT_S)
        raise self.died or EngineDead("released too late")

    def abandon(self, reason: str) -> EngineDead:
        if not self.can_be_ended:
            return EngineStuck(reason)
        self.died = EngineDead(f"{reason}; no answer from rank 1 of 2")
        self.release.set()
        return self.died


def engine_over(executor: HangingExecutor) -> AsyncEngine:
    """Return an engine with a step timeout of 0.2 s."""
    built = scripted_engine(executor)
    core: EngineCore = built.core
    core.watch = StepWatch(0.2)
    return AsyncEngine(core, built.info, EngineConfig(Path("model")))


async def first_update(engine: AsyncEngine) -> None:
    sampling = SamplingParams(max_tokens=4)
    async for _ in engine.generate(EngineRequest("a", (1, 2, 3), sampling)):
        return


def test_requests_fail_with_the_timeout_and_the_silent_rank() -> None:
    engine = engine_over(HangingExecutor())
    with pytest.raises(EngineDead, match=r"within 0\.2 s.*no answer from rank 1 of 2"):
        asyncio.run(asyncio.wait_for(first_update(engine), TEST_TIMEOUT_S))
    with pytest.raises(EngineDead, match="no answer from rank 1"):
        engine.check_ready()
    engine.close()


def test_engine_whose_hung_step_cannot_be_aborted_is_stuck(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its requests and its health check fail although the thread hangs; the log has its stack."""
    executor = HangingExecutor(can_be_ended=False)
    engine = engine_over(executor)
    with pytest.raises(EngineStuck):
        asyncio.run(asyncio.wait_for(first_update(engine), TEST_TIMEOUT_S))
    with pytest.raises(EngineStuck):
        engine.check_health()
    assert "self.release.wait(TEST_TIMEOUT_S)" in caplog.text
    executor.release.set()
    engine.close()


def test_stalled_engine_rejects_requests() -> None:
    engine = engine_over(HangingExecutor())
    core = engine._core
    core.watch = StepWatch(1000.0)
    core.watch.begin()
    check(core.watch, 0.0, 600.0)
    with pytest.raises(EngineStalled, match="a step has been running for"):
        engine.check_ready()
    engine.check_health()
    with pytest.raises(EngineStalled):
        asyncio.run(asyncio.wait_for(first_update(engine), TEST_TIMEOUT_S))
    core.watch.end()
    engine.close()


@pytest.mark.parametrize("order", ["the core first", "the watchdog first"])
def test_core_may_reply_while_its_step_is_given_up(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = scripted_engine(ScriptedExecutor())
    engine = AsyncEngine(built.core, built.info, EngineConfig(Path("model")))
    posted: asyncio.Queue[ResetPrefixCache] = asyncio.Queue()
    real = engine._core.post

    def post(_core: EngineCore, command: Command) -> None:
        if isinstance(command, ResetPrefixCache):
            posted.put_nowait(command)
        else:
            real(command)

    async def ask() -> bool:
        asking = asyncio.ensure_future(engine.reset_prefix_cache())
        command = await posted.get()

        class GivenUp(EngineDead):
            def __str__(self) -> str:
                """Read by ``fail`` after it has found who waits, and before it tells them."""
                if order == "the core first":
                    command.reply(True)
                return "given up"

        engine.fail(GivenUp())
        command.reply(True)  # of a step that ends after all
        return await asking

    monkeypatch.setattr(EngineCore, "post", post)
    if order == "the core first":
        assert asyncio.run(ask())
    else:
        with pytest.raises(EngineDead, match="given up"):
            asyncio.run(ask())
    engine.close()
