"""What an SSD tier may use: its directories, threads and timeouts, and its daily write budget.

The command line and the engine's options create these configurations; ``SsdTier`` uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SsdDirectoryConfig:
    """Configuration of a directory that one store uses exclusively.

    Args:
        path: an existing, writable directory.
        capacity_bytes: size of all its segments together.
        segment_bytes: size of one segment.
        min_free_bytes: free space to leave on the file system: no segment is added that would leave
            less.
    """

    path: Path
    capacity_bytes: int
    segment_bytes: int = 256 << 20
    min_free_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class SsdConfig:
    """Configuration of a store's SSD tier.

    Args:
        directories: one per drive; several on one drive bring no gain.
        write_bytes_per_day: write budget of all drives together; 0 for no limit.
        read_threads, write_threads: threads per directory, i.e. requests in flight per drive.
        max_queued_writes: upper bound of the writes queued per directory; chunks beyond it are
            skipped.
        read_timeout_s: timeout in seconds of reading a part of a chunk, on top of the time that the
            slowest supported drive takes for its bytes, and of opening a directory; past it the
            drive is considered hung. Also how long the store's start waits for the scans.
        write_timeout_s: the same timeout for writes; larger, since drives pause for garbage
            collection.
    """

    directories: tuple[SsdDirectoryConfig, ...]
    write_bytes_per_day: int = 0
    read_threads: int = 8
    write_threads: int = 4
    max_queued_writes: int = 64
    read_timeout_s: float = 2.0
    write_timeout_s: float = 10.0


@dataclass(slots=True)
class SsdBudget:
    """The write budget of the SSD tier: a token bucket that refills evenly over the day. Pure.

    Args:
        bytes_per_day: refill rate; 0 for no limit.
        full_s: size of the bucket in seconds of refill, which bounds a burst.
    """

    bytes_per_day: int
    full_s: float = 3600.0
    _left: float = field(init=False, default=0.0)
    _filled_at: float | None = field(init=False, default=None)

    def take(self, nbytes: int, now: float) -> bool:
        """Spend this many bytes; False if the budget does not have them."""
        if not self.bytes_per_day:
            return True
        self._left = self._refilled(nbytes, now)
        self._filled_at = now
        if self._left < nbytes:
            return False
        self._left -= nbytes
        return True

    def left(self, now: float) -> int:
        """The bytes that the budget has now; 0 without a limit."""
        return int(self._refilled(0, now))

    def _refilled(self, at_least: int, now: float) -> float:
        """The bytes in the bucket by now. It holds at least ``at_least``, once it has filled up."""
        rate = self.bytes_per_day / 86_400
        most = max(rate * self.full_s, at_least)
        if self._filled_at is None:
            return most
        return min(most, self._left + rate * (now - self._filled_at))
