"""A worker extension that holds a pipeline's last stage up."""

from __future__ import annotations

import time
from pathlib import Path

from mooncake_engine.execution.worker_extension import ExtensionContext, LayerDone
from mooncake_engine.scheduling.step_plan import StepPlan

PATIENCE_S = 60.0
PAUSE_S = 0.2
SLOW = b"slow"


class StageExtension:
    """Two ways to be slow, one of which it is sent.

    A folder's name: the first stage notes there which steps it begins, and the last stage waits in
    the middle of each step, but those that sample, for the note of the next one. So a step gets to
    its end only if the next has begun before. ``SLOW``: the last stage pauses in every layer.
    """

    def __init__(self, context: ExtensionContext) -> None:
        self._context = context
        self._is_first = context.pool.shard.layer_start == 0
        self._notes: Path | None = None
        self._is_slow = False

    def receive(self, message: bytes) -> None:
        """Say how to be slow; answered with ``ready``."""
        self._is_slow = message == SLOW
        self._notes = None if self._is_slow else Path(message.decode())
        self._context.emit(b"ready")

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """Leave a note, or wait for it once a layer has run; or pause."""
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
    deadline = time.monotonic() + PATIENCE_S
    while not note.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the first stage did not begin step {note.name} meanwhile")
        time.sleep(0.001)


def make(context: ExtensionContext) -> StageExtension:
    """The factory."""
    return StageExtension(context)
