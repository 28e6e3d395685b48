"""How often chunks are asked for, and whether a copy of them is worth what it pushes out."""

from __future__ import annotations

from collections.abc import Iterable

HALF_LIFE_S = 300.0
MAX_CHUNKS = 1_000_000
"""Of chunks that were not asked for since as many others were, at most so many are remembered."""
_MAX_HALF_LIVES = 500
"""A weight of 2 to that power is still a number."""


class HeatMeter:
    """Requests per chunk, decaying.

    A request at time t adds ``2 ** (t / half-life)``: what decays is what is read, not what is
    kept. Chunks are kept in two generations: one that fills, and the one before.

    Args:
        half_life_s: after which a request counts half.
        max_chunks: of a generation.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, max_chunks: int = MAX_CHUNKS) -> None:
        self._half_life_s = half_life_s
        self._max_chunks = max_chunks
        self._since = 0.0
        self._counts: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._carry = 0.0

    def touch(self, keys: Iterable[int], now: float) -> None:
        """A request asks for these chunks."""
        age = (now - self._since) / self._half_life_s
        if len(self._counts) >= self._max_chunks or age > _MAX_HALF_LIVES:
            self._before, self._carry = self._counts, 0.5**age
            self._counts, self._since, age = {}, now, 0.0
        weight, carry, counts, before = 2.0**age, self._carry, self._counts, self._before
        for key in keys:
            count = counts.get(key)
            counts[key] = weight + (before.get(key, 0.0) * carry if count is None else count)

    def of(self, key: int, now: float) -> float:
        """The decayed number of requests; 0 for a chunk that was forgotten."""
        count = self._counts.get(key)
        if count is None:
            count = self._before.get(key, 0.0) * self._carry
        return float(count * 0.5 ** ((now - self._since) / self._half_life_s))


class CacheReports:
    """What instances say about their host caches: whether there is room, and what would go next.

    An instance that said nothing is taken to have room.
    """

    def __init__(self) -> None:
        self._victims: dict[int, int | None] = {}
        self._changed: set[int] = set()

    def report(self, slot: int, victim: int | None) -> None:
        """The chunk that an instance would evict next; None while it has room."""
        self._victims[slot] = victim
        self._changed.add(slot)

    def victim(self, slot: int) -> int | None:
        """What a new chunk would push out."""
        return self._victims.get(slot)

    def changed(self) -> set[int]:
        """The slots that have reported since this was asked last."""
        found, self._changed = self._changed, set()
        return found
