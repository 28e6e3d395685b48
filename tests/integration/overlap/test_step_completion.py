"""A failure ends an instance at once, with its reason, whatever is in flight."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_engine.assembly import start_executors
from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import EngineDead
from mooncake_engine.execution.engine_plan import make_plan
from mooncake_engine.execution.executor import Executor, ExecutorOptions, InProcessExecutor
from mooncake_engine.execution.process_executor import ProcessExecutor
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_hal.registry import Registry
from mooncake_hal_cpu.cpu_backend import CpuBackend
from mooncake_hal_cpu.cpu_device import CpuRuntime

GREEDY = SamplingParams(temperature=0.0)
PROMPT = NewRequest("a", (5, 6, 7), 3, GREEDY, 0, (1,))
FIRST = StepPlan(0, new_requests=(PROMPT,), sequences=(ScheduledSequence("a", 0, 3),))
NEXT = StepPlan(1, sequences=(ScheduledSequence("a", 3, 1),))
BROKEN = StepPlan(1, sequences=(ScheduledSequence("nobody", 0, 1),))


@pytest.fixture(params=[1, 2], ids=["InProcessExecutor", "ProcessExecutor"])
def executor(request: pytest.FixtureRequest, model: Path) -> Iterator[Executor]:
    config = EngineConfig(model, num_kv_blocks=8, tp_size=request.param, async_scheduling=True)
    backend = Registry.discover().select_backend("cpu")
    executor = start_executors(make_plan(config, backend), backend, [ExecutorOptions()])[0]
    yield executor
    executor.close()


def test_results_arrive_in_order(executor: Executor) -> None:
    pending = [executor.execute_model(plan) for plan in (FIRST, NEXT)]
    results = [step.result() for step in pending]
    assert [result.step for result in results] == [0, 1]
    assert all(result.plain_tokens.keys() == {"a"} for result in results)
    # plans and reports in flight at once: neither side waits for the other to read
    pending = [executor.execute_model(_larger_than_a_pipe(step)) for step in range(4)]
    assert [step.result().step for step in pending] == [0, 1, 2, 3]


def test_failed_step_does_not_affect_previous_step(executor: Executor) -> None:
    first, broken = executor.execute_model(FIRST), executor.execute_model(BROKEN)
    assert first.result().num_tokens == 1
    with pytest.raises(EngineDead, match="nobody"):
        broken.result()
    with pytest.raises(EngineDead, match="nobody"):
        executor.check()
    with pytest.raises(EngineDead, match="nobody"):
        executor.execute_model(NEXT).result()


def test_dead_rank_fails_steps_in_flight(model: Path) -> None:
    config = EngineConfig(model, num_kv_blocks=8, tp_size=2, async_scheduling=True)
    executor = ProcessExecutor(make_plan(config, Registry.discover().select_backend("cpu")))
    try:
        os.kill(executor.rank_pids[1], signal.SIGSTOP)
        pending = [executor.execute_model(plan) for plan in (FIRST, NEXT)]
        os.kill(executor.rank_pids[1], signal.SIGKILL)
        for step in pending:
            with pytest.raises(EngineDead, match="rank 1 of 2 died: killed by SIGKILL"):
                step.result()
    finally:
        executor.close()


def _larger_than_a_pipe(step: int) -> StepPlan:
    num_tokens = 200_000
    prompt = tuple(range(3, 203)) * (num_tokens // 200)
    return StepPlan(step, new_requests=(NewRequest(f"b{step}", prompt, num_tokens, GREEDY, 0, ()),))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_stepping_thread_sets_current_device(model: Path, *, async_scheduling: bool) -> None:
    """The thread that loads a model is rarely the one that steps, and each has its own current
    device."""
    backend = CpuBackend()
    bound: set[int] = set()

    class Runtime(CpuRuntime):
        def bind_thread(self, index: int) -> None:
            bound.add(threading.get_ident())

    backend.runtime = Runtime()
    config = EngineConfig(model, num_kv_blocks=8, async_scheduling=async_scheduling)
    executor = InProcessExecutor(make_plan(config, backend), backend)
    threads: list[int] = []

    def step() -> None:
        threads.append(threading.get_ident())
        executor.execute_model(FIRST).result()

    stepping = threading.Thread(target=step)
    stepping.start()
    stepping.join()
    executor.close()
    assert set(threads) <= bound
    assert len(bound) == (3 if async_scheduling else 2), "the loading thread, this one, its own"
