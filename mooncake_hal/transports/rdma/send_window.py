"""The send window of a queue pair: queued, in flight and completed requests; and striping over
queue pairs. Pure.

Requests on a reliable connection complete in the order in which they were posted. So one number
describes the progress, and after a failure the requests after it can be posted again.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class HasEnds(Protocol):
    """The property of a transfer that a window reads."""

    @property
    def ends(self) -> NDArray[np.int64]:
        """[n] cumulative bytes of the pieces, each included."""
        ...


TransferT = TypeVar("TransferT", bound=HasEnds)


@dataclass(frozen=True, slots=True)
class PieceRun(Generic[TransferT]):
    """Consecutive pieces ``[start, stop)`` of one transfer. Once posted, ``first_id`` is the number
    of the first one's request."""

    transfer: TransferT
    start: int
    stop: int
    first_id: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Total size of the pieces in bytes."""
        before = int(self.transfer.ends[self.start - 1]) if self.start else 0
        return int(self.transfer.ends[self.stop - 1]) - before


class SendWindow(Generic[TransferT]):
    """Limits the requests and bytes in flight, and tracks them in order.

    Args:
        requests: maximum number of requests in flight.
        nbytes: maximum number of bytes in flight; a longer piece is posted alone.
    """

    def __init__(self, requests: int, nbytes: int) -> None:
        self._requests = requests
        self._nbytes = nbytes
        self._queue: deque[PieceRun[TransferT]] = deque()
        self._in_flight: deque[PieceRun[TransferT]] = deque()
        self._next_id = 1
        self._done_id = 0
        self._bytes = 0

    @property
    def in_flight(self) -> int:
        """Number of requests that were posted and have not completed."""
        return self._next_id - 1 - self._done_id

    def add(self, run: PieceRun[TransferT]) -> None:
        """Queue pieces."""
        self._queue.append(run)

    def post_next(self, least: int = 1) -> PieceRun[TransferT] | None:
        """Move as many queued pieces as the limits permit to in flight; returns them for the caller
        to post.

        Args:
            least: minimum number of free requests, unless none are in flight; makes refills come
                in batches.
        """
        free = self._requests - self.in_flight
        if not self._queue or free < (least if self._in_flight else 1):
            return None
        head = self._queue[0]
        stop = min(head.start + free, head.stop, self._within_bytes(head))
        if stop <= head.start:
            return None
        run = PieceRun(head.transfer, head.start, stop, self._next_id)
        self._next_id += len(run)
        self._bytes += run.nbytes
        self._in_flight.append(run)
        if stop == head.stop:
            self._queue.popleft()
        else:
            self._queue[0] = PieceRun(head.transfer, stop, head.stop)
        return run

    def complete(self, last_id: int) -> list[tuple[TransferT, int]]:
        """Mark all requests up to ``last_id`` as completed; returns the number of completed pieces
        per transfer."""
        done = []
        while self._in_flight and self._done_id < last_id:
            run = self._in_flight.popleft()
            count = min(last_id - run.first_id + 1, len(run))
            part = PieceRun(run.transfer, run.start, run.start + count)
            if count < len(run):
                rest = PieceRun(run.transfer, run.start + count, run.stop, run.first_id + count)
                self._in_flight.appendleft(rest)
            self._bytes -= part.nbytes
            self._done_id += count
            done.append((run.transfer, count))
        return done

    def owner_of(self, request_id: int) -> TransferT | None:
        """Return the transfer of a request that is in flight, or None."""
        for run in self._in_flight:
            if run.first_id <= request_id < run.first_id + len(run):
                return run.transfer
        return None

    def take_unfinished(self) -> list[PieceRun[TransferT]]:
        """Empty the window; returns all pieces that have not completed, which can be posted again
        on any connection.

        Call it only when requests in flight can't access memory any more.
        """
        left = [
            PieceRun(run.transfer, run.start, run.stop) for run in (*self._in_flight, *self._queue)
        ]
        self._in_flight.clear()
        self._queue.clear()
        self._done_id = self._next_id - 1
        self._bytes = 0
        return left

    def drop(self, transfer: TransferT) -> int:
        """Remove a transfer's queued pieces; returns their number."""
        dropped = sum(len(run) for run in self._queue if run.transfer is transfer)
        if dropped:
            self._queue = deque(run for run in self._queue if run.transfer is not transfer)
        return dropped

    def holds(self, transfer: TransferT) -> bool:
        """Whether pieces of a transfer are in flight."""
        return any(run.transfer is transfer for run in self._in_flight)

    def _within_bytes(self, head: PieceRun[TransferT]) -> int:
        """Return the end of the run's pieces that fit into the limit of bytes in flight."""
        before = int(head.transfer.ends[head.start - 1]) if head.start else 0
        budget = self._nbytes - self._bytes
        stop = int(np.searchsorted(head.transfer.ends, before + max(budget, 0), side="right"))
        return max(stop, head.start + 1) if not self._in_flight else stop


def stripe(
    ends: NDArray[np.int64], start: int, stop: int, connections: int
) -> list[tuple[int, int]]:
    """Divide pieces ``[start, stop)`` into consecutive runs of about equal size in bytes.

    Args:
        ends: [n] cumulative bytes of the pieces, each included.
        start, stop: range of pieces.
        connections: wanted number of runs; there are fewer if there are fewer pieces.

    Returns:
        (start, stop) of each run, in order, none of them empty.
    """
    before = int(ends[start - 1]) if start else 0
    total = int(ends[stop - 1]) - before
    marks = before + np.arange(1, connections, dtype=np.int64) * total // connections
    inner = np.searchsorted(ends[start:stop], marks, side="left") + start + 1
    edges = [start, *np.minimum(inner, stop).tolist(), stop]
    return [(low, high) for low, high in itertools.pairwise(edges) if high > low]
