"""Tracks what each rank of an instance holds, while the index knows only the whole instance.

The data-parallel ranks of an instance publish separately. The instance holds a chunk while any of
them does. The rank that holds a prompt's prefix should also compute the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mooncake_conductor.index.event_stream import ChunkHoldings
from mooncake_conductor.index.holder_sets import Tier


class PublisherHoldings:
    """The publishers of one instance: its ranks.

    Args:
        index: receives what the instance as a whole holds.
        num_ranks: number of its data-parallel ranks.
    """

    def __init__(self, index: ChunkHoldings, num_ranks: int) -> None:
        self._index = index
        self._num_ranks = num_ranks
        # Per tier: chunk key -> bit mask of the publishers that hold it.
        self._holders: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._unhealthy = 0
        self.ranks = tuple(OnePublisher(self, number) for number in range(num_ranks))

    def leading_chunks(self, keys: Iterable[int]) -> list[int]:
        """Leading chunks of a prompt in device memory, per rank."""
        held, still = self._holders[Tier.DEVICE], (1 << self._num_ranks) - 1
        leading = [0] * self._num_ranks
        for number, key in enumerate(keys, 1):
            still &= held.get(key, 0)
            if not still:
                break
            for rank in range(len(leading)):
                if still >> rank & 1:
                    leading[rank] = number
        return leading

    def stored(self, publisher: int, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """Add chunks that a publisher holds now."""
        held, bit, first = self._holders[tier], 1 << publisher, []
        for key in keys:
            if key not in held:
                first.append(key)
            held[key] = held.get(key, 0) | bit
        self._index.stored(slot, tier, first)

    def removed(self, publisher: int, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """Remove chunks that a publisher no longer holds in a tier."""
        held, bit, last = self._holders[tier], 1 << publisher, []
        for key in keys:
            if (others := held.get(key, 0) & ~bit) != held.get(key, 0):
                if others:
                    held[key] = others
                else:
                    del held[key]
                    last.append(key)
        self._index.removed(slot, tier, last)

    def cleared(self, publisher: int, slot: int) -> None:
        """Remove all chunks of a publisher."""
        for tier in Tier:
            self.removed(publisher, slot, tier, self.held_by(publisher, tier))
        if not any(self._holders):
            self._index.cleared(slot)

    def set_healthy(self, publisher: int, slot: int, is_healthy: bool) -> None:
        """Set a publisher's health. The instance is healthy if all its publishers are."""
        bit = 1 << publisher
        self._unhealthy = self._unhealthy & ~bit if is_healthy else self._unhealthy | bit
        self._index.set_healthy(slot, not self._unhealthy)

    def held_by(self, publisher: int, tier: Tier) -> Sequence[int]:
        """Keys of all chunks that a publisher holds in a tier."""
        return [key for key, held in self._holders[tier].items() if held >> publisher & 1]


class OnePublisher(ChunkHoldings):
    """The holdings of one publisher, to which its event stream applies events."""

    def __init__(self, holdings: PublisherHoldings, number: int) -> None:
        self._holdings = holdings
        self._number = number

    def stored(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        self._holdings.stored(self._number, slot, tier, keys)

    def removed(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        self._holdings.removed(self._number, slot, tier, keys)

    def cleared(self, slot: int) -> None:
        self._holdings.cleared(self._number, slot)

    def set_healthy(self, slot: int, is_healthy: bool) -> None:
        self._holdings.set_healthy(self._number, slot, is_healthy)
