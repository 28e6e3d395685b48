"""Base classes of the ``Transfer`` objects that our transports return."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from mooncake_hal.errors import TransferCancelled, TransferError, TransferTimeout
from mooncake_hal.transport import TransferState


class FinishedTransfer:
    """A transfer that completed or failed before it was returned to the caller."""

    __slots__ = ("_error",)

    def __init__(self, error: TransferError | None = None) -> None:
        self._error = error

    def poll(self) -> TransferState:
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def wait(self, timeout: float | None = None) -> None:
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        pass


DONE = FinishedTransfer()


class PendingTransfer(ABC):
    """A transfer that other threads execute; see ``Transfer``.

    Args:
        deadline: ``time.monotonic`` value by which all of it must be done.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._timeout = deadline - time.monotonic()
        self._error: TransferError | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def poll(self) -> TransferState:
        if not self._ended.is_set():
            return TransferState.PENDING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def wait(self, timeout: float | None = None) -> None:
        left = max(self.deadline - time.monotonic(), 0.0)
        if not self._ended.wait(left if timeout is None else min(timeout, left)):
            if timeout is not None and timeout < left:
                raise TransferTimeout(f"still running after {timeout:g} s of waiting")
            self.abort(self.late())
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        self.abort(TransferCancelled("cancelled by this side"))

    def late(self) -> TransferTimeout:
        """Return the error of a transfer whose deadline has passed."""
        return deadline_error(self._timeout)

    @abstractmethod
    def abort(self, error: TransferError) -> None:
        """Fail the transfer with ``error`` unless it is over; returns once it is drained."""


class RunningTransfer(PendingTransfer):
    """A transfer in several parts, which other threads execute.

    The owner of each part calls ``part_ended`` once; the first error becomes the transfer's.

    Args:
        parts: number of parts.
        deadline: ``time.monotonic`` value by which all parts must be done.
        stop: asks the parts to stop early; they react within milliseconds. Called at most once,
            from any thread.
        ended: called once, after the last part has ended.
    """

    def __init__(
        self,
        parts: int,
        deadline: float,
        stop: Callable[[], object],
        ended: Callable[[RunningTransfer], object] | None = None,
    ) -> None:
        super().__init__(deadline)
        self._stop = stop
        self._on_end = ended
        self._parts = parts
        self._is_stopping = False

    def abort(self, error: TransferError) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._error = self._error or error
            first, self._is_stopping = not self._is_stopping, True
        if first:
            self._stop()
        self._ended.wait()

    def part_ended(self, error: TransferError | None) -> None:
        """Count one part as ended."""
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            is_last = self._parts == 0
            must_stop = error is not None and not is_last and not self._is_stopping
            self._is_stopping = self._is_stopping or must_stop
        if must_stop:
            self._stop()
        if is_last:
            if self._on_end is not None:
                self._on_end(self)
            self._ended.set()


def deadline_after(timeout: float) -> float:
    """Return the ``time.monotonic`` value ``timeout`` seconds from now."""
    return time.monotonic() + timeout


def deadline_error(timeout: float) -> TransferTimeout:
    """Return the error of a transfer that took longer than ``timeout`` seconds."""
    return TransferTimeout(f"not done within {timeout:.3g} s; drained")
