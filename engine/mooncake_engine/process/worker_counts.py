"""Counts the requests of an instance's API workers, in memory that the workers share.

Each worker writes its own counts and reads those of all, without a lock. A limit over all workers
holds because each worker counts a request before it checks the sum.
"""

from __future__ import annotations

from mmap import mmap

_NUMBERS = 2
_NUMBER_BYTES = 8
COUNTS_BYTES = 4096
"""Size of the shared memory: one page, enough for ``MAX_WORKERS``."""
MAX_WORKERS = COUNTS_BYTES // (_NUMBERS * _NUMBER_BYTES)


class WorkerCounts:
    """The counts of all workers, initially zero.

    Args:
        memory: ``COUNTS_BYTES`` bytes that the workers share; None for a server without workers.
        worker: index of the worker whose counts this process writes.
    """

    def __init__(self, memory: mmap | None = None, worker: int = 0) -> None:
        whole = memoryview(bytearray(COUNTS_BYTES) if memory is None else memory)
        self._numbers = whole[:COUNTS_BYTES].cast("Q")
        self._first = worker * _NUMBERS

    def set_num_in_engine(self, num_requests: int) -> None:
        """Set this worker's number of choices that run or wait in the engine."""
        self._numbers[self._first] = num_requests

    def set_num_waiting(self, num_clients: int) -> None:
        """Set this worker's number of clients that wait for a response."""
        self._numbers[self._first + 1] = num_clients

    @property
    def num_in_engine(self) -> int:
        """Number of choices of all workers that run or wait in the engine."""
        return sum(self._numbers[::_NUMBERS].tolist())

    @property
    def num_waiting(self) -> int:
        """Number of clients of all workers that wait for a response."""
        return sum(self._numbers[1::_NUMBERS].tolist())
