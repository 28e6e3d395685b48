"""What one queue pair has to do, has in flight and has done; striping over queue pairs. Pure.

Requests of a reliable connection complete in the order they were posted, so one number says how
far it has got, and whatever was not done when it broke can be posted again from there.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class HasEnds(Protocol):
    """A transfer's pieces, as far as a window looks at them."""

    @property
    def ends(self) -> NDArray[np.int64]:
        """[n] bytes of all pieces up to and including each."""
        ...


TransferT = TypeVar("TransferT", bound=HasEnds)


@dataclass(frozen=True, slots=True)
class PieceRun(Generic[TransferT]):
    """Consecutive pieces ``start`` to ``stop`` of one transfer; ``first_id`` once posted."""

    transfer: TransferT
    start: int
    stop: int
    first_id: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        before = int(self.transfer.ends[self.start - 1]) if self.start else 0
        return int(self.transfer.ends[self.stop - 1]) - before


class SendWindow(Generic[TransferT]):
    """Bounds how many requests and bytes are in flight, and keeps them in order.

    Args:
        requests: most requests in flight.
        nbytes: most bytes in flight; a longer piece is posted alone.
    """

    def __init__(self, requests: int, nbytes: int) -> None:
        self._requests = requests
        self._nbytes = nbytes
        self._queue: deque[PieceRun[TransferT]] = deque()
        self._flight: deque[PieceRun[TransferT]] = deque()
        self._next_id = 1
        self._done_id = 0
        self._bytes = 0

    @property
    def in_flight(self) -> int:
        """Requests posted and not done."""
        return self._next_id - 1 - self._done_id

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to post and nothing in flight."""
        return not self._queue and not self._flight

    def add(self, run: PieceRun[TransferT]) -> None:
        """Queue pieces."""
        self._queue.append(run)

    def post_next(self, least: int = 1) -> PieceRun[TransferT] | None:
        """Move the next pieces into flight and return them to be posted, as many as fit.

        Args:
            least: how many requests must be free, unless nothing is in flight, so that refills
                come in batches.
        """
        room = self._requests - self.in_flight
        if not self._queue or room < (least if self._flight else 1):
            return None
        head = self._queue[0]
        stop = min(head.start + room, head.stop, self._within_bytes(head))
        if stop <= head.start:
            return None
        run = PieceRun(head.transfer, head.start, stop, self._next_id)
        self._next_id += len(run)
        self._bytes += run.nbytes
        self._flight.append(run)
        if stop == head.stop:
            self._queue.popleft()
        else:
            self._queue[0] = PieceRun(head.transfer, stop, head.stop)
        return run

    def complete(self, last_id: int) -> list[tuple[TransferT, int]]:
        """Take in that all requests up to ``last_id`` are done; return pieces done per transfer."""
        done = []
        while self._flight and self._done_id < last_id:
            run = self._flight.popleft()
            count = min(last_id - run.first_id + 1, len(run))
            part = PieceRun(run.transfer, run.start, run.start + count)
            if count < len(run):
                rest = PieceRun(run.transfer, run.start + count, run.stop, run.first_id + count)
                self._flight.appendleft(rest)
            self._bytes -= part.nbytes
            self._done_id += count
            done.append((run.transfer, count))
        return done

    def owner_of(self, request_id: int) -> TransferT | None:
        """Return whose request that is, if it is in flight."""
        for run in self._flight:
            if run.first_id <= request_id < run.first_id + len(run):
                return run.transfer
        return None

    def take_unfinished(self) -> list[PieceRun[TransferT]]:
        """Empty the window; return all that is not done, to be posted again, here or elsewhere.

        Only when nothing in flight can touch memory any more.
        """
        left = [
            PieceRun(run.transfer, run.start, run.stop) for run in (*self._flight, *self._queue)
        ]
        self._flight.clear()
        self._queue.clear()
        self._done_id = self._next_id - 1
        self._bytes = 0
        return left

    def drop(self, transfer: TransferT) -> int:
        """Forget a transfer's pieces that are not posted; return how many they were."""
        dropped = sum(len(run) for run in self._queue if run.transfer is transfer)
        if dropped:
            self._queue = deque(run for run in self._queue if run.transfer is not transfer)
        return dropped

    def holds(self, transfer: TransferT) -> bool:
        """Whether pieces of a transfer are in flight."""
        return any(run.transfer is transfer for run in self._flight)

    def _within_bytes(self, head: PieceRun[TransferT]) -> int:
        """Return up to which of its pieces the bytes in flight stay within bounds."""
        before = int(head.transfer.ends[head.start - 1]) if head.start else 0
        budget = self._nbytes - self._bytes
        stop = int(np.searchsorted(head.transfer.ends, before + max(budget, 0), side="right"))
        return max(stop, head.start + 1) if not self._flight else stop


def stripe(
    ends: NDArray[np.int64], start: int, stop: int, connections: int
) -> list[tuple[int, int]]:
    """Divide pieces ``start`` to ``stop`` into consecutive runs of about equal bytes.

    Args:
        ends: [n] bytes of all pieces up to and including each.
        start, stop: which pieces.
        connections: how many runs are wanted; fewer come back where there are fewer pieces.

    Returns:
        (first, last + 1) of each run, in order, none of them empty.
    """
    before = int(ends[start - 1]) if start else 0
    total = int(ends[stop - 1]) - before
    marks = before + np.arange(1, connections, dtype=np.int64) * total // connections
    inner = np.searchsorted(ends[start:stop], marks, side="left") + start + 1
    edges = [start, *np.minimum(inner, stop).tolist(), stop]
    return [(low, high) for low, high in itertools.pairwise(edges) if high > low]
