"""The scheduler's cost per step: planning it and processing its tokens, without any model.

Measured as CPU time of the thread, the median of many steps, since other programs run as well.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from support.figures import Figure, record

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.scheduler_interface import SchedulerLimits
from mooncake_engine.scheduling.step_plan import SampledToken, StepPlan, StepResult

RUNNING = 256
BLOCKS = 10_000
BLOCK_SIZE = 16
PROMPT = 64
STEPS = 300
LONG = 400
"""Number of tokens of a long answer."""
TURNS = 64


def running_scheduler() -> Scheduler:
    """A scheduler whose requests have completed their prompts, each at its own position in its last
    block."""
    limits = SchedulerLimits(RUNNING, 1 << 20, BLOCKS * BLOCK_SIZE, frozenset({2}), watermark=0.01)
    scheduler = Scheduler(limits, BlockManager(BLOCKS, BLOCK_SIZE, prefix_caching=True))
    for index in range(RUNNING):
        prompt = tuple(range(index, index + PROMPT + index % BLOCK_SIZE))
        sampling = SamplingParams(max_tokens=None)
        scheduler.add(Request(EngineRequest(f"r{index}", prompt, sampling), 0, float(index)))
    step(scheduler)
    assert scheduler.num_running == RUNNING
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, {s.request_id: (SampledToken(7),) for s in plan.sequences})


def step(scheduler: Scheduler) -> float:
    """Seconds of CPU time for one step, without the fake model's part."""
    begun = time.thread_time()
    scheduler.expire(0.0)
    plan = scheduler.schedule()
    planned = time.thread_time()
    result = result_of(plan)
    resumed = time.thread_time()
    scheduler.update(plan, result)
    return planned - begun + time.thread_time() - resumed


def step_ms(*schedulers: Scheduler, steps: int = STEPS) -> list[float]:
    """The median of each scheduler; they take turns, so that other load on the host affects all."""
    with collector_off():
        rounds = [[step(scheduler) for scheduler in schedulers] for _ in range(steps)]
    return [1e3 * median(times) for times in zip(*rounds, strict=True)]


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection, whose time would be attributed to whichever step triggers it."""
    gc.disable()
    yield
    gc.enable()


def test_step_of_256_requests(benchmark: Any) -> None:
    scheduler = running_scheduler()
    (measured,) = step_ms(scheduler)
    benchmark.pedantic(step, (scheduler,), rounds=20)
    context = f"{RUNNING} running, {BLOCKS} blocks; CPU time, median of {STEPS}"
    record(
        benchmark,
        Figure("engine: scheduler step", measured, 1.0, "ms", at_least=False, context=context),
    )


def test_step_cost_does_not_grow_with_answer_length(benchmark: Any) -> None:
    fresh, old = running_scheduler(), running_scheduler()
    for _ in range(LONG):
        step(old)
    early, late = step_ms(fresh, old, steps=TURNS)
    benchmark.pedantic(step, (old,), rounds=2)
    context = f"{late:.2f} ms after {LONG} tokens, {early:.2f} ms from the start, in turns"
    name = "engine: scheduler step, long answers"
    record(benchmark, Figure(name, late / early, 1.2, "times", at_least=False, context=context))
