"""How far a rank's steps have come, layer by layer: saves follow the steps that compute what they
copy.

A layer counts as written when an event has passed that was recorded behind its writes. Whoever
waits asks by the step's number, which may come before the step does, or long after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_hal.backend import Event
from mooncake_hal.errors import TransferCancelled
from mooncake_kv.connector_worker import LayerDone

KEPT_STEPS = 4
"""Steps whose layers are told apart: the one that is launched, and some before it, for orders that
come late. A layer of one that came before these counts when the first of them begins."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step with a hook.

    Args:
        before: has passed when all earlier steps are over.
        layers: has passed when a layer's KV is written; of the layers that are enqueued.
    """

    before: Event
    layers: dict[int, Event] = field(default_factory=dict)


class StepProgress:
    """``begin`` and the hooks that it returns belong to the step's thread, the rest to any.

    Args:
        make_event: a new event of the rank's device.
    """

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._steps: dict[int, _Step] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def begin(self, number: int) -> LayerDone:
        """A step is about to be launched, behind all earlier ones; returns its layer hook."""
        step = _Step(self._recorded())
        with self._changed:
            self._steps[number] = step
            if len(self._steps) > KEPT_STEPS:
                del self._steps[next(iter(self._steps))]
            self._changed.notify_all()

        def layer_done(layer: int) -> None:
            event = self._recorded()
            with self._changed:
                step.layers[layer] = event
                self._changed.notify_all()

        return layer_done

    def await_layer(self, number: int, layer: int, timeout_s: float) -> None:
        """Block until a step has written a layer's KV.

        Raises:
            TransferCancelled: it has not begun to, or ``close`` was called.
            DeviceError: the device failed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (event := self._find(number, layer)) is None:
                if self._is_closed:
                    raise TransferCancelled("the rank ends")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TransferCancelled(
                        f"step {number} did not come to layer {layer} within {timeout_s:.1f} s"
                    )
        event.synchronize()

    def close(self) -> None:
        """Nobody waits any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _find(self, number: int, layer: int) -> Event | None:
        step = self._steps.get(number)
        if step is not None and layer in step.layers:
            return step.layers[layer]
        return next((later.before for known, later in self._steps.items() if known > number), None)

    def _recorded(self) -> Event:
        event = self._make_event()
        event.record()
        return event
