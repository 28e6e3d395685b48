"""The thread that copies for one peer, piece by piece, so that a transfer can be stopped."""

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
    """A part of a transfer that has begun to move.

    Args:
        finish: waits until it has moved, and completes it; raises TransferError.
        drain: cancels it; nothing of it moves when this returns.
    """

    finish: Callable[[], None]
    drain: Callable[[], None]


class Copier(Protocol):
    """What the thread copies with, and gives back at its end; the rest is the transport's."""

    def drain(self) -> None:
        """Block until everything that was enqueued has been copied; raises DeviceError."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


C = TypeVar("C", bound=Copier)
C_contra = TypeVar("C_contra", bound=Copier, contravariant=True)


class MovePart(Protocol[C_contra]):
    """Moves a part of a transfer."""

    def __call__(self, part: Spans, deadline: float, copier: C_contra, /) -> InFlightPart:
        """Start to move it: the next part is started before this one is finished.

        Raises:
            TransferError: it was not started, and nothing of it moves.
        """
        ...


@dataclass(frozen=True)
class PartMover(Generic[C]):
    """How a peer moves a transfer.

    Args:
        move: moves a part.
        confirm: called with the whole transfer when all parts have moved; raises TransferError
            for what the parts can't notice, such as a peer that died.
        most_bytes: of a part.
    """

    move: MovePart[C]
    confirm: Callable[[Spans, float], None]
    most_bytes: int


class CopyJob(Generic[C]):
    """One transfer for the worker.

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
        way: PartMover[C],
        local_keys: frozenset[int],
    ) -> None:
        self._spans = spans
        self._way = way
        self.local_keys = local_keys
        self._has_begun = False
        self._is_stopped = False
        self._lock = threading.Lock()
        self.transfer = RunningTransfer(1, deadline_after(timeout), self.stop)

    @property
    def is_over(self) -> bool:
        """Whether its transfer has ended."""
        return self.transfer.poll() is not TransferState.PENDING

    def stop(self) -> None:
        """End it at the next piece; one that waits behind another job ends here."""
        with self._lock:
            self._is_stopped = True
            has_begun = self._has_begun
        if not has_begun:
            self.transfer.part_ended(TransferCancelled("stopped before it began"))

    def enter(self) -> bool:
        """Say that it begins; False if it has been stopped before."""
        with self._lock:
            self._has_begun = not self._is_stopped
            return self._has_begun

    def run(self, copier: C) -> None:
        """Copy all of it.

        Raises:
            TransferError: it was stopped, is late, or the peer's memory is gone.
        """
        underway: deque[InFlightPart] = deque()
        try:
            for begin, end in split_parts(self._spans.nbytes, self._way.most_bytes):
                underway.append(self._begin(slice(begin, end), copier))
                if len(underway) > 1:
                    underway.popleft().finish()
            if underway:
                underway.popleft().finish()
            self._way.confirm(self._spans, self.transfer.deadline)
        finally:
            for left in underway:
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
    """Owns a copier; jobs are done in the order they came. One that waits for its peer holds up
    those behind it: each peer has a worker of its own.

    Args:
        make_copier: called on the thread, which it binds to the device.

    Raises:
        TransferError: the host has no thread left.
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
        """Take a job; raises TransferError if the thread has no copier."""
        if self._error is not None:
            raise TransferError("there is nothing to copy with") from self._error
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread once its jobs are done; none comes after this."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            copier = self._make_copier()
        except Exception as exc:  # thread top: the transfers that wait must fail with it
            logger.exception("there is nothing to copy with")
            self._error = exc
            self._refuse_all(exc)
            return
        while (job := self._jobs.get()) is not None:
            self._end(job, copier)
        try:
            copier.close()
        except Exception:  # thread top: nobody copies with it any more
            logger.exception("a copier can't be given back")

    def _end(self, job: CopyJob[C], copier: C) -> None:
        if not job.enter():
            return
        error: TransferError | None = None
        try:
            job.run(copier)
        except TransferError as exc:
            error = exc
        except HalError as exc:
            error = self._broken_off(copier, str(exc))
        except Exception as exc:  # it is this transfer's: memory that is short may be free again
            logger.exception("copying failed")
            error = self._broken_off(copier, repr(exc))
        job.transfer.part_ended(error)

    def _broken_off(self, copier: C, reason: str) -> TransferError:
        """The failure of a transfer of which the copier may have enqueued more than it said."""
        try:
            copier.drain()
        except Exception:  # thread top: a device that fails so copies nothing any more
            logger.exception("a copier can't be drained")
        return TransferError(f"copying failed: {reason}")

    def _refuse_all(self, exc: Exception) -> None:
        while (job := self._jobs.get()) is not None:
            if job.enter():
                job.transfer.part_ended(TransferError(f"there is nothing to copy with: {exc!r}"))


def split_parts(nbytes: NDArray[np.uint64], most_bytes: int) -> list[tuple[int, int]]:
    """Ranges of pieces, each of at most ``most_bytes`` and MAX_PIECES: [(begin, end), ...].

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
        end = min(end, begin + MAX_PIECES)
        ranges.append((begin, end))
        begin = end
    return ranges
