"""Transfers as the transports here hand them out: over at once, or running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mooncake_hal.errors import TransferCancelled, TransferError, TransferTimeout
from mooncake_hal.transport import TransferState


class FinishedTransfer:
    """A transfer that was over before it could be handed out."""

    __slots__ = ("_error",)

    def __init__(self, error: TransferError | None = None) -> None:
        self._error = error

    def poll(self) -> TransferState:
        """See ``Transfer``."""
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def wait(self, timeout: float | None = None) -> None:
        """See ``Transfer``."""
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """See ``Transfer``."""


DONE = FinishedTransfer()


class RunningTransfer:
    """A transfer in several parts, worked on by other threads.

    The parts' owners call ``part_ended`` once each; the first failure is the transfer's. ``stop``
    asks them to end early and must make them notice within milliseconds.

    Args:
        parts: how many there are.
        deadline: ``time.monotonic`` value after which the workers end it themselves.
        stop: called at most once, from any thread, when it is to end early.
    """

    def __init__(self, parts: int, deadline: float, stop: Callable[[], None]) -> None:
        self.deadline = deadline
        self._stop = stop
        self._parts = parts
        self._error: TransferError | None = None
        self._stopping = False
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def poll(self) -> TransferState:
        """See ``Transfer``."""
        if not self._ended.is_set():
            return TransferState.PENDING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def wait(self, timeout: float | None = None) -> None:
        """See ``Transfer``."""
        if not self._ended.wait(timeout):
            raise TransferTimeout(f"still running after {timeout} s of waiting")
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """See ``Transfer``."""
        self.abort(TransferCancelled("cancelled by this side"))

    def abort(self, error: TransferError) -> None:
        """End it with ``error`` unless it has ended; returns when it is drained."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = self._error or error
            first, self._stopping = not self._stopping, True
        if first:
            self._stop()
        self._ended.wait()

    def part_ended(self, error: TransferError | None) -> bool:
        """Count one part as ended; returns whether it was the last."""
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            last = self._parts == 0
            stop = error is not None and not last and not self._stopping
            self._stopping = self._stopping or stop
        if stop:
            self._stop()
        if last:
            self._ended.set()
        return last


def deadline_error(timeout: float) -> TransferTimeout:
    """Return the failure of a transfer that took too long."""
    return TransferTimeout(f"not done within {timeout:g} s; drained")


def deadline_after(timeout: float) -> float:
    """Return the ``time.monotonic`` value ``timeout`` seconds from now."""
    return time.monotonic() + timeout
