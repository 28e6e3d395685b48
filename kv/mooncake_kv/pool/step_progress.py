"""Tracks the progress of a rank's steps layer by layer, so that saves can copy each layer as soon
as its step has computed it. Used by ``PoolWorker``.

A layer counts as written once the event that was recorded after its writes has completed. Waiters
identify a step by its number; they may start to wait before the step begins, or long after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_hal.backend import Event
from mooncake_hal.errors import TransferCancelled
from mooncake_kv.connector_worker import LayerDone

MAX_STEPS = 4
"""Number of steps whose layers are tracked individually: the one being launched, and some before
it for orders that arrive late. The layers of an older step count as written once the oldest tracked
step begins on the device."""


@dataclass(slots=True, eq=False)
class _Step:
    """A step that is being tracked.

    Args:
        before: event that completes when all earlier steps are done.
        layers: for each enqueued layer, the event that completes when its KV is written.
    """

    before: Event
    layers: dict[int, Event] = field(default_factory=dict)


class StepProgress:
    """The progress of one rank's steps. ``begin`` and the hooks that it returns must be called on
    the step's thread; all other methods are thread-safe.

    Args:
        make_event: creates an event of the rank's device.
    """

    def __init__(self, make_event: Callable[[], Event]) -> None:
        self._make_event = make_event
        self._steps: dict[int, _Step] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def begin(self, number: int) -> LayerDone:
        """A step is about to be launched, after all earlier ones; returns its layer hook."""
        step = _Step(self._recorded())
        with self._changed:
            self._steps[number] = step
            if len(self._steps) > MAX_STEPS:
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
            TransferCancelled: the layer was not enqueued in time, or ``close`` was called.
            DeviceError: the device failed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (event := self._find(number, layer)) is None:
                if self._is_closed:
                    raise TransferCancelled("the rank is shutting down")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TransferCancelled(
                        f"step {number} did not reach layer {layer} within {timeout_s:.1f} s"
                    )
        event.synchronize()

    def close(self) -> None:
        """Make all waits fail. Idempotent."""
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
