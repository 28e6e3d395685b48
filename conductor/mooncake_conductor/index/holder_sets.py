"""Holder sets: the instances that hold a chunk, stored once for all chunks that share them.

The chunks of a prompt are nearly always held by the same instances. A chunk's entry is therefore a
reference to a shared set, and a chunk costs as much memory with one instance as with a hundred.

Holders are instances and, with numbers after those of all instances, whatever instances share, such
as a node store. A set names a shared holder itself, so that its events and its users change
independently of each other: each user holds what the shared holder does.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum

NUM_TIERS = 3


class Tier(IntEnum):
    """Where an instance holds a chunk, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


TierMasks = tuple[int, int, int]
"""A bit per holder, for each tier."""
Instances = tuple[TierMasks, int]
"""Bit masks of instances per tier, and of all tiers."""


class HolderSet:
    """Bit masks of holders per tier. ``union`` is the mask of all tiers.

    Args:
        masks: bit mask of each tier.
        number: unique number of the set while it is in use; 0 for the empty set.
    """

    __slots__ = ("instances", "instances_at", "masks", "num_chunks", "number", "union")

    def __init__(self, masks: TierMasks, number: int = 0) -> None:
        self.masks = masks
        self.number = number
        self.union = masks[0] | masks[1] | masks[2]
        self.num_chunks = 0
        # See ``SharedHolders.instances_of``: the latest result, and the version that it is of.
        self.instances: Instances = (masks, self.union)
        self.instances_at = -1

    def has(self, slot: int, tier: Tier) -> bool:
        """Whether an instance holds the chunk in a tier."""
        return bool(self.masks[tier] >> slot & 1)

    def clear(self, slot: int, tier: Tier | None) -> None:
        """Remove an instance from the set, for all chunks that share it."""
        self.masks = _without(self.masks, slot, tier)
        self.union = self.masks[0] | self.masks[1] | self.masks[2]
        self.instances_at = -1


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


class SharedHolders:
    """The holders that instances share, and which instances use them.

    Args:
        num_instances: most instances at the same time.
    """

    def __init__(self, num_instances: int) -> None:
        self._num_instances = num_instances
        # Mask of the instances that use each shared holder, by its number; holders by instance.
        self._users: dict[int, int] = {}
        self._used: dict[int, set[int]] = {}
        self._removed: list[int] = []
        self._version = 0

    def add(self) -> int:
        """Add a holder without users. Returns its number, which may be that of a removed one."""
        found = self._removed.pop() if self._removed else self._num_instances + len(self._users)
        self._users[found] = 0
        return found

    def remove(self, holder: int) -> None:
        """Remove a holder that is in no set any more."""
        for slot in [slot for slot, used in self._used.items() if holder in used]:
            self.leave(holder, slot)
        del self._users[holder]
        self._removed.append(holder)

    def join(self, holder: int, slot: int) -> None:
        """Add an instance to the users of a holder."""
        self._users[holder] |= 1 << slot
        self._used.setdefault(slot, set()).add(holder)
        self._version += 1

    def leave(self, holder: int, slot: int) -> None:
        """Remove an instance from the users of a holder."""
        self._users[holder] &= ~(1 << slot)
        self._used[slot].discard(holder)
        self._version += 1

    def used_by(self, slot: int) -> Collection[int]:
        """The shared holders that an instance uses."""
        return self._used.get(slot, ())

    def expand(self, mask: int) -> int:
        """The instances in a mask of holders, and those that use the other holders in it."""
        shared = mask >> self._num_instances
        if not shared:
            return mask
        mask ^= shared << self._num_instances
        while shared:
            mask |= self._users[self._num_instances + (shared & -shared).bit_length() - 1]
            shared &= shared - 1
        return mask

    def expand_tiers(self, masks: TierMasks) -> Instances:
        """``expand`` for each tier."""
        first, second, third = map(self.expand, masks)
        return (first, second, third), first | second | third

    def instances_of(self, held: HolderSet) -> Instances:
        """The instances that hold the chunks of a set."""
        if held.instances_at != self._version:
            held.instances = self.expand_tiers(held.masks)
            held.instances_at = self._version
        return held.instances


def _without(masks: TierMasks, slot: int, tier: Tier | None) -> TierMasks:
    keep = ~(1 << slot)
    if tier is None:
        return (masks[0] & keep, masks[1] & keep, masks[2] & keep)
    kept = list(masks)
    kept[tier] &= keep
    return (kept[0], kept[1], kept[2])
