"""How often chunks are asked for, and whether a copy of them is worth what it pushes out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

HALF_LIFE_S = 300.0
MAX_CHUNKS = 1_000_000
"""Beyond that many, the chunk that was not asked for the longest is forgotten."""


class HeatMeter:
    """Requests per chunk, decaying.

    Args:
        half_life_s: after which a request counts half.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S) -> None:
        self._decay = 0.5 ** (1 / half_life_s)
        self._counts: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def touch(self, keys: Iterable[int], now: float) -> None:
        """A request asks for these chunks."""
        counts = self._counts
        for key in keys:
            count, since = counts.get(key, (0.0, now))
            counts[key] = (1.0 + count * self._decay ** (now - since), now)
            counts.move_to_end(key)
        while len(counts) > MAX_CHUNKS:
            counts.popitem(last=False)

    def of(self, key: int, now: float) -> float:
        """The decayed number of requests; 0 for a chunk that was forgotten."""
        count, since = self._counts.get(key, (0.0, now))
        return count * float(self._decay ** (now - since))


class CacheReports:
    """What instances say about their host caches: whether there is room, and what would go next.

    An instance that said nothing is taken to have room.
    """

    def __init__(self) -> None:
        self._victims: dict[int, int | None] = {}

    def report(self, slot: int, victim: int | None) -> None:
        """The chunk that an instance would evict next; None while it has room."""
        self._victims[slot] = victim

    def victim(self, slot: int) -> int | None:
        """What a new chunk would push out."""
        return self._victims.get(slot)


def is_worth_keeping(
    *,
    heat: float,
    num_copies: int,
    victim_heat: float,
    victim_copies: int,
    refetch_s: float,
    recompute_s: float,
) -> bool:
    """Whether another copy saves more than what it pushes out would cost.

    A copy saves a fetch; a victim with another copy costs a fetch, the last one a computation.
    """
    gain = heat / (num_copies + 1) * refetch_s
    victim_cost = refetch_s if victim_copies > 1 else recompute_s
    return gain > victim_heat / max(victim_copies, 1) * victim_cost
