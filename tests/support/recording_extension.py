"""A worker extension that replies to messages, for tests of the seam that carries them."""

from __future__ import annotations

import threading

from mooncake_engine.execution.worker_extension import ExtensionContext, LayerDone
from mooncake_engine.scheduling.step_plan import StepPlan


class RecordingExtension:
    """Echoes messages with its rank and pool, counts layers, and fails in a thread on request."""

    def __init__(self, context: ExtensionContext) -> None:
        self._context = context
        self._layers: list[int] = []

    def receive(self, message: bytes) -> None:
        """``report`` replies with facts; ``die`` raises in a helper thread, ``raise`` here."""
        if message == b"report":
            context = self._context
            facts = (context.rank, context.num_ranks, context.pool.num_blocks, self._layers)
            context.emit(repr(facts).encode())
        elif message == b"die":
            threading.Thread(target=self._die).start()
        else:
            raise ValueError(f"unknown message {message!r}")

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """Count the layers of steps that have sequences."""
        return self._layers.append if plan.sequences else None

    def close(self) -> None:
        """Report that it was closed."""
        self._context.emit(b"closed")

    def _die(self) -> None:
        self._context.fail(RuntimeError("lost the fabric"))


def make(context: ExtensionContext) -> RecordingExtension:
    """The factory."""
    return RecordingExtension(context)
