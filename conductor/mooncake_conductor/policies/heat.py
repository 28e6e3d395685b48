"""Heat: how often chunks are requested, and which chunks instances would evict for a new one."""

from __future__ import annotations

from collections.abc import Iterable

HALF_LIFE_S = 300.0
MAX_CHUNKS = 1_000_000
"""Chunks per generation. A chunk is forgotten after this many others were requested since."""
_MAX_HALF_LIVES = 500
"""Half-lives until weights are rebased, before 2 to that power overflows a float."""


class HeatMeter:
    """Exponentially decaying request counts of chunks.

    A request at time t adds ``2 ** (t / half-life)``, so that stored counts need no updates: the
    decay is applied when they are read. Chunks are kept in two generations: the current one and the
    one before.

    Args:
        half_life_s: seconds after which a request counts half.
        max_chunks: chunks per generation.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, max_chunks: int = MAX_CHUNKS) -> None:
        self._half_life_s = half_life_s
        self._max_chunks = max_chunks
        self._since = 0.0
        self._counts: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._carry = 0.0

    def touch(self, keys: Iterable[int], now: float) -> None:
        """Count a request for these chunks."""
        age = (now - self._since) / self._half_life_s
        if len(self._counts) >= self._max_chunks or age > _MAX_HALF_LIVES:
            self._before, self._carry = self._counts, 0.5**age
            self._counts, self._since, age = {}, now, 0.0
        weight, carry, counts, before = 2.0**age, self._carry, self._counts, self._before
        for key in keys:
            count = counts.get(key)
            counts[key] = weight + (before.get(key, 0.0) * carry if count is None else count)

    def of(self, key: int, now: float) -> float:
        """The decayed number of requests for a chunk; 0 if it is forgotten."""
        count = self._counts.get(key)
        if count is None:
            count = self._before.get(key, 0.0) * self._carry
        return float(count * 0.5 ** ((now - self._since) / self._half_life_s))


class CacheReports:
    """The chunk that each instance's host cache would evict next.

    An instance without a report is assumed to have free space.
    """

    def __init__(self) -> None:
        self._victims: dict[int, int | None] = {}
        self._changed: set[int] = set()

    def report(self, slot: int, victim: int | None) -> None:
        """Set the chunk that an instance would evict next; None: it has free space."""
        self._victims[slot] = victim
        self._changed.add(slot)

    def victim(self, slot: int) -> int | None:
        """The chunk that a new one would evict; None: there is free space."""
        return self._victims.get(slot)

    def changed(self) -> set[int]:
        """The slots that have reported since the last call."""
        found, self._changed = self._changed, set()
        return found
