"""The worker thread that copies one peer's transfers, part by part, so that they can be
cancelled."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import HalError, TransferCancelled, TransferError
from mooncake_hal.transport import Spans, TransferState
from mooncake_hal.transports.staging import MAX_PIECES
from mooncake_hal.transports.transfers import RunningTransfer, deadline_after

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlightPart:
    """A part of a transfer that is in flight.

    Args:
        finish: waits for the part and completes it; raises TransferError.
        drain: cancels the part; none of its bytes move once this returns.
    """

    finish: Callable[[], None]
    drain: Callable[[], None]


class Copier(Protocol):
    """The thread's copy resources, which it closes at its end. How a copier copies is up to the
    transport."""

    def drain(self) -> None:
        """Block until all enqueued copies have finished; raises DeviceError if one failed."""
        ...

    def close(self) -> None:
        """Release the resources."""
        ...


C = TypeVar("C", bound=Copier)
C_contra = TypeVar("C_contra", bound=Copier, contravariant=True)


class MovePart(Protocol[C_contra]):
    """Starts the parts of transfers."""

    def __call__(self, part: Spans, deadline: float, copier: C_contra, /) -> InFlightPart:
        """Start moving a part; the worker starts the next part before it finishes this one.

        Raises:
            TransferError: the part was not started, and none of its bytes move.
        """
        ...


@dataclass(frozen=True)
class PartMover(Generic[C]):
    """How a peer moves a transfer.

    Args:
        move: starts moving a part.
        confirm: called with the whole transfer when all parts have been moved; raises TransferError
            for failures that the parts can't detect, such as a peer that died.
        max_bytes: maximum size of a part in bytes.
    """

    move: MovePart[C]
    confirm: Callable[[Spans, float], None]
    max_bytes: int


class CopyJob(Generic[C]):
    """One transfer in the worker's queue.

    Args:
        spans: the spans to move, none of them longer than ``way.max_bytes``.
        timeout: timeout of the whole transfer, in seconds.
        way: how to move it.
        local_keys: keys of our regions that it touches.
    """

    def __init__(
        self,
        spans: Spans,
        timeout: float,
        way: PartMover[C],
        local_keys: frozenset[int],
    ) -> None:
        self._spans = spans
        self._way = way
        self.local_keys = local_keys
        self._has_started = False
        self._is_stopped = False
        self._lock = threading.Lock()
        self.transfer = RunningTransfer(1, deadline_after(timeout), self.stop)

    @property
    def is_over(self) -> bool:
        """Whether the transfer has completed or failed."""
        return self.transfer.poll() is not TransferState.PENDING

    def stop(self) -> None:
        """Stop the transfer before its next part; if the job is still queued, end it here."""
        with self._lock:
            self._is_stopped = True
            has_started = self._has_started
        if not has_started:
            self.transfer.part_ended(TransferCancelled("stopped before it began"))

    def mark_started(self) -> bool:
        """Mark the job as started; returns False if it was stopped before."""
        with self._lock:
            self._has_started = not self._is_stopped
            return self._has_started

    def run(self, copier: C) -> None:
        """Move the whole transfer.

        Raises:
            TransferError: it was stopped, its deadline passed, or the peer's memory is gone.
        """
        in_flight: deque[InFlightPart] = deque()
        try:
            for begin, end in split_parts(self._spans.nbytes, self._way.max_bytes):
                in_flight.append(self._begin(slice(begin, end), copier))
                if len(in_flight) > 1:
                    in_flight.popleft().finish()
            if in_flight:
                in_flight.popleft().finish()
            self._way.confirm(self._spans, self.transfer.deadline)
        finally:
            for left in in_flight:
                left.drain()

    def _begin(self, pieces: slice, copier: C) -> InFlightPart:
        if self._is_stopped:
            raise TransferCancelled("stopped before it was done")
        if time.monotonic() > self.transfer.deadline:
            raise self.transfer.late()
        arrays = (self._spans.local, self._spans.remote, self._spans.nbytes)
        part = Spans(*(array[pieces] for array in arrays))
        return self._way.move(part, self.transfer.deadline, copier)


class CopyWorker(Generic[C]):
    """A thread with a copier that executes jobs in the order of their submission. A job that waits
    for its peer delays all later ones, so every peer has a worker of its own.

    Args:
        make_copier: creates the copier; called on the thread, which it binds to the device.

    Raises:
        TransferError: no thread could be started.
    """

    def __init__(self, make_copier: Callable[[], C]) -> None:
        self._make_copier = make_copier
        self._jobs: queue.SimpleQueue[CopyJob[C] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="device-copy", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            raise TransferError(f"a peer's copying thread can't be started: {exc}") from exc

    def submit(self, job: CopyJob[C]) -> None:
        """Queue a job; raises TransferError if the thread has no copier."""
        if self._error is not None:
            raise TransferError("no copier could be created") from self._error
        self._jobs.put(job)

    def close(self) -> None:
        """Finish the queued jobs and join the thread; no job may be submitted afterwards."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            copier = self._make_copier()
        except Exception as exc:  # thread top: queued transfers must fail with it
            logger.exception("no copier could be created")
            self._error = exc
            self._fail_all(exc)
            return
        while (job := self._jobs.get()) is not None:
            self._end(job, copier)
        try:
            copier.close()
        except Exception:  # thread top: the copier is not used any more
            logger.exception("a copier can't be closed")

    def _end(self, job: CopyJob[C], copier: C) -> None:
        if not job.mark_started():
            return
        error: TransferError | None = None
        try:
            job.run(copier)
        except TransferError as exc:
            error = exc
        except HalError as exc:
            error = self._drained_error(copier, str(exc))
        except Exception as exc:  # fails this transfer only: a memory shortage may be temporary
            logger.exception("copying failed")
            error = self._drained_error(copier, repr(exc))
        job.transfer.part_ended(error)

    def _drained_error(self, copier: C, reason: str) -> TransferError:
        """Drain the copier, which may have enqueued copies before it failed; returns the transfer's
        error."""
        try:
            copier.drain()
        except Exception:  # thread top: a device that fails like this copies nothing any more
            logger.exception("a copier can't be drained")
        return TransferError(f"copying failed: {reason}")

    def _fail_all(self, exc: Exception) -> None:
        while (job := self._jobs.get()) is not None:
            if job.mark_started():
                job.transfer.part_ended(TransferError(f"no copier could be created: {exc!r}"))


def split_parts(nbytes: NDArray[np.uint64], max_bytes: int) -> list[tuple[int, int]]:
    """Divide pieces into ranges of at most ``max_bytes`` and MAX_PIECES: [(begin, end), ...].

    Args:
        nbytes: lengths of the pieces, none above ``max_bytes``.
        max_bytes: maximum total length of a range.
    """
    before = np.cumsum(nbytes, dtype=np.uint64) - nbytes
    after = before + nbytes
    ranges, begin = [], 0
    while begin < len(nbytes):
        limit = before[begin] + np.uint64(max_bytes)
        end = int(np.searchsorted(after, limit, side="right"))
        end = min(end, begin + MAX_PIECES)
        ranges.append((begin, end))
        begin = end
    return ranges
