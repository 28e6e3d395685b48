"""The thread that copies for one endpoint, piece by piece, so that a transfer can be stopped."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mooncake_hal.errors import HalError, TransferCancelled, TransferError
from mooncake_hal.transport import Spans, TransferState
from mooncake_hal.transports.transfers import RunningTransfer, deadline_after
from mooncake_hal_cuda.copying.copier import Addresses, Copies

logger = logging.getLogger(__name__)

PART_PIECES = 1 << 16


@dataclass(frozen=True, slots=True)
class Underway:
    """A part that is on its way.

    Args:
        finish: waits for it, and does what is left to do; raises TransferError.
        drain: gives it up; nothing of it moves when this returns.
    """

    finish: Callable[[], None]
    drain: Callable[[], None]


class Move(Protocol):
    """Moves a part of a transfer."""

    def __call__(self, part: Spans, deadline: float, copier: Copies) -> Underway:
        """Set it on its way: the next part begins before this one is finished.

        Raises:
            TransferError: nothing of it moves any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class Way:
    """How a peer moves a transfer.

    Args:
        move: moves a part.
        confirm: called with all of it when it has moved; raises TransferError if something was
            wrong that no part has noticed.
        most_bytes: of a part.
    """

    move: Move
    confirm: Callable[[Spans, float], None]
    most_bytes: int


class Job:
    """A transfer and what it takes to make it.

    Args:
        spans: what moves, none of them above ``way.most_bytes``.
        timeout: seconds for all of it.
        way: how it is moved.
        local_keys: our regions that it touches.
    """

    def __init__(
        self,
        spans: Spans,
        timeout: float,
        way: Way,
        local_keys: frozenset[int],
    ) -> None:
        self._spans = spans
        self._way = way
        self.local_keys = local_keys
        self.is_stopped = threading.Event()
        self.transfer = RunningTransfer(1, deadline_after(timeout), self.is_stopped.set)

    @property
    def is_over(self) -> bool:
        """Whether its transfer has ended."""
        return self.transfer.poll() is not TransferState.PENDING

    def run(self, copier: Copies) -> None:
        """Copy all of it.

        Raises:
            TransferError: it was stopped, is late, or the peer's memory is gone.
        """
        underway: deque[Underway] = deque()
        try:
            for begin, end in parts_of(self._spans.nbytes, self._way.most_bytes):
                underway.append(self._begin(slice(begin, end), copier))
                if len(underway) > 1:
                    underway.popleft().finish()
            if underway:
                underway.popleft().finish()
            self._way.confirm(self._spans, self.transfer.deadline)
        finally:
            for left in underway:
                left.drain()

    def _begin(self, pieces: slice, copier: Copies) -> Underway:
        if self.is_stopped.is_set():
            raise TransferCancelled("stopped before it was done")
        if time.monotonic() > self.transfer.deadline:
            raise self.transfer.late()
        arrays = (self._spans.local, self._spans.remote, self._spans.nbytes)
        part = Spans(*(array[pieces] for array in arrays))
        return self._way.move(part, self.transfer.deadline, copier)


class Worker:
    """Owns a copier; jobs are done in the order they came.

    Args:
        make_copier: called on the thread, which it binds to the device.
    """

    def __init__(self, make_copier: Callable[[], Copies]) -> None:
        self._make_copier = make_copier
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="cuda-copy", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Take a job; raises TransferError if the thread has failed."""
        if self._error is not None:
            raise TransferError("the copying thread failed") from self._error
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread once its jobs are done."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            copier = self._make_copier()
            while (job := self._jobs.get()) is not None:
                self._end(job, copier)
            copier.close()
        except Exception as exc:  # thread top: whoever waits must hear of it
            logger.exception("the copying thread failed")
            self._error = exc
            self._refuse_all(exc)

    def _end(self, job: Job, copier: Copies) -> None:
        error: TransferError | None = None
        try:
            job.run(copier)
        except TransferError as exc:
            error = exc
        except HalError as exc:
            error = TransferError(f"copying failed: {exc}")
        except BaseException as exc:
            job.transfer.part_ended(TransferError(f"the copying thread failed: {exc!r}"))
            raise
        job.transfer.part_ended(error)

    def _refuse_all(self, exc: Exception) -> None:
        while (job := self._jobs.get()) is not None:
            job.transfer.part_ended(TransferError(f"the copying thread failed: {exc!r}"))


def parts_of(nbytes: Addresses, most_bytes: int) -> list[tuple[int, int]]:
    """Ranges of pieces, each of at most ``most_bytes`` and PART_PIECES: [(begin, end), ...].

    Args:
        nbytes: of the pieces, none above ``most_bytes``.
        most_bytes: of a range together.
    """
    before = np.cumsum(nbytes, dtype=np.uint64) - nbytes
    after = before + nbytes
    ranges, begin = [], 0
    while begin < len(nbytes):
        limit = before[begin] + np.uint64(most_bytes)
        end = int(np.searchsorted(after, limit, side="right"))
        end = min(end, begin + PART_PIECES)
        ranges.append((begin, end))
        begin = end
    return ranges
