"""A worker extension that slows down a pipeline's last stage."""

from __future__ import annotations

import time
from pathlib import Path

from mooncake_engine.execution.worker_extension import ExtensionContext, LayerDone
from mooncake_engine.scheduling.step_plan import StepPlan

TIMEOUT_S = 60.0
PAUSE_S = 0.2
SLOW = b"slow"


class StageExtension:
    """Slows the last stage in one of two ways, depending on the message that it is sent.

    A folder's name: the first stage records in that folder which steps it starts, and the last
    stage waits in the middle of each non-sampling step for the record of the next one. So a step
    completes only if the next one has started before. ``SLOW``: the last stage sleeps in every
    layer.
    """

    def __init__(self, context: ExtensionContext) -> None:
        self._context = context
        self._is_first = context.pool.shard.layer_start == 0
        self._notes: Path | None = None
        self._is_slow = False

    def receive(self, message: bytes) -> None:
        """Choose how to slow down; answered with ``ready``."""
        self._is_slow = message == SLOW
        self._notes = None if self._is_slow else Path(message.decode())
        self._context.emit(b"ready")

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """Record the step, wait for the next step's record once a layer has run, or sleep."""
        if self._is_slow and not self._is_first:
            return lambda layer: time.sleep(PAUSE_S)
        if self._notes is None or not plan.sequences:
            return None
        if self._is_first:
            (self._notes / str(plan.step)).touch()
            return None
        if any(sequence.is_sampling for sequence in plan.sequences):
            return None
        following = self._notes / str(plan.step + 1)
        return lambda layer: _wait_for(following)

    def close(self) -> None:
        """Nothing to stop."""


def _wait_for(note: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not note.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the first stage did not start step {note.name} in time")
        time.sleep(0.001)


def make(context: ExtensionContext) -> StageExtension:
    """The factory."""
    return StageExtension(context)
