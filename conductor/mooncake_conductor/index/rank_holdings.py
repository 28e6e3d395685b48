"""Which of an instance's data-parallel ranks holds what; the index knows the instance alone.

Ranks publish apart: a chunk is the instance's from the first rank that holds it to the last. Which
rank a prompt's beginning is on decides where in the instance the prompt is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import xor

from mooncake_conductor.index.event_stream import ChunkHoldings
from mooncake_conductor.index.holder_sets import Tier


class RankHoldings:
    """The ranks of one instance.

    Args:
        index: where the instance has a slot.
        num_ranks: of the instance.
    """

    def __init__(self, index: ChunkHoldings, num_ranks: int) -> None:
        self._index = index
        # By tier, from a chunk's key to the ranks that hold it, as bits.
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._unhealthy = 0
        self.ranks = tuple(OneRank(self, rank) for rank in range(num_ranks))

    def leading_chunks(self, keys: Iterable[int]) -> list[int]:
        """By rank, how many of a prompt's first chunks it has in its device's memory."""
        held, still = self._holders[Tier.DEVICE], (1 << len(self.ranks)) - 1
        leading = [0] * len(self.ranks)
        for number, key in enumerate(keys, 1):
            still &= held.get(key, 0)
            if not still:
                break
            for rank in range(len(leading)):
                if still >> rank & 1:
                    leading[rank] = number
        return leading

    def stored(self, rank: int, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """A rank holds these chunks now."""
        held, bit, first = self._holders[tier], 1 << rank, []
        for key in keys:
            if key not in held:
                first.append(key)
            held[key] = held.get(key, 0) | bit
        self._index.stored(slot, tier, first)

    def removed(self, rank: int, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """A rank no longer holds these chunks in that tier."""
        held, bit, last = self._holders[tier], 1 << rank, []
        for key in keys:
            if (others := held.get(key, 0) & ~bit) != held.get(key, 0):
                if others:
                    held[key] = others
                else:
                    del held[key]
                    last.append(key)
        self._index.removed(slot, tier, last)

    def cleared(self, rank: int, slot: int) -> None:
        """A rank holds nothing any more."""
        for tier in Tier:
            self.removed(rank, slot, tier, self.held_by(rank, tier))
        if not any(self._holders):
            self._index.cleared(slot)

    def set_healthy(self, rank: int, slot: int, is_healthy: bool) -> None:
        """Whether a rank's events have arrived without a gap: the instance is as its worst rank."""
        bit = 1 << rank
        self._unhealthy = self._unhealthy & ~bit if is_healthy else self._unhealthy | bit
        self._index.set_healthy(slot, not self._unhealthy)

    def held_by(self, rank: int, tier: Tier) -> Sequence[int]:
        """Keys of all chunks that a rank holds in that tier."""
        return [key for key, ranks in self._holders[tier].items() if ranks >> rank & 1]


class OneRank(ChunkHoldings):
    """What one rank's events are applied to."""

    def __init__(self, holdings: RankHoldings, rank: int) -> None:
        self._holdings = holdings
        self._rank = rank

    def stored(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        self._holdings.stored(self._rank, slot, tier, keys)

    def removed(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        self._holdings.removed(self._rank, slot, tier, keys)

    def cleared(self, slot: int) -> None:
        self._holdings.cleared(self._rank, slot)

    def set_healthy(self, slot: int, is_healthy: bool) -> None:
        self._holdings.set_healthy(self._rank, slot, is_healthy)

    def digest(self, slot: int, tier: Tier) -> tuple[int, int]:
        keys = self._holdings.held_by(self._rank, tier)
        return len(keys), reduce(xor, keys, 0)
