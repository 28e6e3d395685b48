"""Following a step layer by layer: a wait ends when the step has written the layer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from mooncake_hal.errors import TransferCancelled
from mooncake_kv.pool.step_progress import MAX_STEPS, StepProgress

TIMEOUT_S = 20.0


class Device:
    """A device that runs work in the order of its enqueuing; an event passes when the test says
    so."""

    def __init__(self) -> None:
        self.passed = threading.Semaphore(0)
        self.num_recorded = 0

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.number = -1

    def record(self) -> None:
        self.number = self.device.num_recorded
        self.device.num_recorded += 1

    def synchronize(self) -> None:
        assert self.device.passed.acquire(timeout=TIMEOUT_S)


def started(wait: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_wait_for_layer_ends_when_device_has_written_it() -> None:
    device = Device()
    progress = StepProgress(device.event)
    waiting = started(lambda: progress.await_layer(3, 1, TIMEOUT_S))
    layer_done = progress.begin(3)
    layer_done(0)
    device.passed.release()  # no wait for layer 0: this one is for layer 1, once it is enqueued
    waiting.join(0.05)
    assert waiting.is_alive()
    layer_done(1)
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()


def test_enqueued_step_is_not_completed() -> None:
    device = Device()
    progress = StepProgress(device.event)
    progress.begin(0)(7)
    waiting = started(lambda: progress.await_layer(0, 7, TIMEOUT_S))
    waiting.join(0.05)
    assert waiting.is_alive()
    device.passed.release()
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()


def test_late_order_for_old_step_waits_for_start_of_newer_one() -> None:
    device = Device()
    progress = StepProgress(device.event)
    for number in range(0, 2 * MAX_STEPS, 2):
        progress.begin(number)(0)
    progress.begin(50)
    device.passed.release(2)
    progress.await_layer(0, 0, 0.0)
    progress.await_layer(1, 0, 0.0)  # its hook was not called


def test_wait_for_a_step_that_never_starts_times_out() -> None:
    progress = StepProgress(Device().event)
    with pytest.raises(TransferCancelled, match="step 4 did not reach layer 2 within"):
        progress.await_layer(4, 2, 0.01)
    closing = threading.Timer(0.02, progress.close)
    closing.start()
    with pytest.raises(TransferCancelled):
        progress.await_layer(4, 2, TIMEOUT_S)
    closing.join()
