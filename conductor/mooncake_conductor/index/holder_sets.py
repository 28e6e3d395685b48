"""Holder sets: the instances that hold a chunk, stored once for all chunks that share them.

The chunks of a prompt are nearly always held by the same instances. A chunk's entry is therefore a
reference to a shared set, and a chunk costs as much memory with one instance as with a hundred.
"""

from __future__ import annotations

from enum import IntEnum

NUM_TIERS = 3


class Tier(IntEnum):
    """Where an instance holds a chunk, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


TierMasks = tuple[int, int, int]
"""A bit per instance slot, for each tier."""


class HolderSet:
    """Bit masks of instance slots per tier. ``union`` is the mask of all tiers.

    Args:
        masks: bit mask of each tier.
        number: unique number of the set while it is in use; 0 for the empty set.
    """

    __slots__ = ("masks", "num_chunks", "number", "union")

    def __init__(self, masks: TierMasks, number: int = 0) -> None:
        self.masks = masks
        self.number = number
        self.union = masks[0] | masks[1] | masks[2]
        self.num_chunks = 0

    def has(self, slot: int, tier: Tier) -> bool:
        """Whether an instance holds the chunk in a tier."""
        return bool(self.masks[tier] >> slot & 1)

    def clear(self, slot: int, tier: Tier | None) -> None:
        """Remove an instance from the set, for all chunks that share it."""
        self.masks = _without(self.masks, slot, tier)
        self.union = self.masks[0] | self.masks[1] | self.masks[2]


NO_HOLDERS = HolderSet((0, 0, 0))


class HolderSets:
    """All sets that are in use, by their masks."""

    def __init__(self) -> None:
        self._sets: dict[TierMasks, HolderSet] = {}
        self._dropped: set[HolderSet] = set()
        # By number; numbers of released sets are reused.
        self.by_number: list[HolderSet] = [NO_HOLDERS]
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._sets)

    def including(self, held: HolderSet, slot: int, tier: Tier) -> HolderSet:
        """The set plus an instance in a tier."""
        masks = list(held.masks)
        masks[tier] |= 1 << slot
        return self._of((masks[0], masks[1], masks[2]))

    def excluding(self, held: HolderSet, slot: int, tier: Tier | None) -> HolderSet:
        """The set without an instance in a tier, or in all tiers if ``tier`` is None."""
        return self._of(_without(held.masks, slot, tier))

    def release(self, held: HolderSet) -> None:
        """Free a set if no chunk refers to it."""
        if held.num_chunks or not held.number:
            return
        if self._sets.get(held.masks) is held:
            del self._sets[held.masks]
        self._dropped.discard(held)
        self.by_number[held.number] = NO_HOLDERS
        self._free.append(held.number)
        held.number = 0

    def drop_slot(self, slot: int, tier: Tier | None = None) -> None:
        """Remove an instance from all sets. The cost depends on the number of sets, not of chunks.

        Two sets may be equal afterwards. Both stay valid; lookups by content find the first one.
        """
        kept: dict[TierMasks, HolderSet] = {}
        for held in [*self._sets.values(), *self._dropped]:
            held.clear(slot, tier)
            if kept.setdefault(held.masks, held) is not held and held.num_chunks:
                self._dropped.add(held)
        self._dropped = {held for held in self._dropped if held.num_chunks}
        self._sets = kept

    def _of(self, masks: TierMasks) -> HolderSet:
        found = self._sets.get(masks)
        if found is None:
            number = self._free.pop() if self._free else len(self.by_number)
            found = self._sets[masks] = HolderSet(masks, number)
            self.by_number[number : number + 1] = [found]
        return found


def _without(masks: TierMasks, slot: int, tier: Tier | None) -> TierMasks:
    keep = ~(1 << slot)
    if tier is None:
        return (masks[0] & keep, masks[1] & keep, masks[2] & keep)
    kept = list(masks)
    kept[tier] &= keep
    return (kept[0], kept[1], kept[2])
