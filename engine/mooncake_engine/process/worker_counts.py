"""What the API workers of an instance have under way, in memory that they share.

Each worker writes its own numbers and reads everybody's, without a lock: a limit over all workers
holds where each counts a request in before it looks at the sum.
"""

from __future__ import annotations

from mmap import mmap

_NUMBERS = 2
_NUMBER_BYTES = 8
COUNTS_BYTES = 4096
"""Size of the memory, a page: room for ``MAX_WORKERS``."""
MAX_WORKERS = COUNTS_BYTES // (_NUMBERS * _NUMBER_BYTES)


class WorkerCounts:
    """Numbers of all workers, zero at first.

    Args:
        memory: that they share, ``COUNTS_BYTES`` of it; None for a server that is alone.
        worker: whose numbers this process writes.
    """

    def __init__(self, memory: mmap | None = None, worker: int = 0) -> None:
        whole = memoryview(bytearray(COUNTS_BYTES) if memory is None else memory)
        self._numbers = whole[:COUNTS_BYTES].cast("Q")
        self._first = worker * _NUMBERS

    def set_in_engine(self, num_requests: int) -> None:
        """So many choices of this worker run or wait in the engine."""
        self._numbers[self._first] = num_requests

    def set_waiting(self, num_clients: int) -> None:
        """So many clients of this worker wait for an answer."""
        self._numbers[self._first + 1] = num_clients

    @property
    def num_in_engine(self) -> int:
        """Choices of all workers that run or wait in the engine."""
        return sum(self._numbers[::_NUMBERS].tolist())

    @property
    def num_waiting(self) -> int:
        """Clients of all workers that wait for an answer."""
        return sum(self._numbers[1::_NUMBERS].tolist())
