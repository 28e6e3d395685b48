"""The steps in flight, planned but not completed, and the freed blocks that they still use."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.step_plan import StepPlan


class InFlightStep(NamedTuple):
    """A step in flight: its plan, its requests (siblings follow their leaders), and the clock
    reading at which it was planned."""

    plan: StepPlan
    requests: list[Request]
    planned: float


class StepsInFlight:
    """The queue of steps in flight, in the order in which the device runs them.

    Args:
        blocks: owner of the block tables.
        is_pipeline: whether each step passes through several pipeline stages.
    """

    def __init__(self, blocks: BlockManager, *, is_pipeline: bool) -> None:
        self._blocks = blocks
        self._is_pipeline = is_pipeline
        self._steps: deque[InFlightStep] = deque()
        self._last_end = 0.0
        self._newest_over = -1
        self._replaced: deque[tuple[int, list[int]]] = deque()  # step that may still read them

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def reach_freed_blocks(self) -> bool:
        """Whether a plan in flight uses blocks that may have been freed since it was made."""
        return any(self._reaches_freed(step.plan) for step in self._steps)

    @property
    def replaced_tables(self) -> list[list[int]]:
        """Lists of duplicate blocks that tables have replaced but steps in flight still use."""
        untaken = [self._blocks.replaced] if self._blocks.replaced else []
        return [*(block_ids for _, block_ids in self._replaced), *untaken]

    def push(self, plan: StepPlan, requests: list[Request], now: float) -> None:
        """Append a step that has been planned."""
        self._steps.append(InFlightStep(plan, requests, now))

    def pop(self, plan: StepPlan, now: float | None) -> tuple[InFlightStep, float | None]:
        """Remove the oldest step, which has completed.

        Returns:
            The step, and its duration in seconds if ``now`` is known. A step that was queued behind
            another one started when that one completed; in a pipeline it started when it was
            planned, since it passes through all stages after that.
        """
        step = self._steps.popleft()
        assert step.plan is plan, f"step {plan.step} is over before {step.plan.step}"
        self._newest_over = plan.step
        if now is None:
            return step, None
        begun = step.planned if self._is_pipeline else max(step.planned, self._last_end)
        self._last_end = now
        return step, now - begun

    def release_replaced(self) -> None:
        """Free the duplicate blocks that tables have replaced, once the last step that was planned
        with them has completed."""
        if replaced := self._blocks.take_replaced():
            newest = self._steps[-1].plan.step if self._steps else self._newest_over
            self._replaced.append((newest, replaced))
        while self._replaced and self._replaced[0][0] <= self._newest_over:
            self._blocks.pool.release(self._replaced.popleft()[1])

    def _reaches_freed(self, plan: StepPlan) -> bool:
        references = self._blocks.pool.references.__getitem__
        return plan.reads_freed_blocks or not all(map(references, plan.received_blocks))
