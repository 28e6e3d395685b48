"""The chunk index: maps chunk keys to the instances that hold them, and looks up prompt prefixes.

Slots are those of instances, and after them those of holders that instances share, such as stores.

Events and predictions fill it. Its answers are hints: instances validate on use, so a stale entry
costs a miss, never wrong KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mooncake_conductor.index.holder_sets import (
    NO_HOLDERS,
    NUM_TIERS,
    HolderSet,
    HolderSets,
    Instances,
    SharedHolders,
    Tier,
)
from mooncake_conductor.index.key_table import KeyArray, KeyTable, as_keys
from mooncake_conductor.index.predictions import Prediction, Predictions

_NUM_PARTS = 256
"""Parts of the table; ``collect`` scans one at a time."""

_FEW = 8

Counts = NDArray[np.int64]


class PrefixMatches(Struct, frozen=True, eq=False):
    """The result of a lookup. Arrays contain counts of chunks, indexed by instance slot.

    Args:
        num_chunks: chunks of the prompt.
        device: leading chunks in device memory.
        host: leading chunks in device or host memory; at least ``device``.
        local: leading chunks in any tier; at least ``host``.
        predicted: leading chunks including those that are being computed or fetched.
        ready_at: time at which the predicted chunks will be available; 0 if none are predicted.
        held: chunks of the fleet's prefix that the instance holds, contiguous or not.
        pool: length of the fleet's prefix: leading chunks that any instance holds.
        runs: the fleet's prefix as runs (number of chunks, bit mask of the slots that hold them).
        hinted: ``local`` including instances whose event stream is unhealthy; only breaks ties.
    """

    num_chunks: int
    device: Counts
    host: Counts
    local: Counts
    predicted: Counts
    ready_at: NDArray[np.float64]
    held: Counts
    pool: int
    runs: tuple[tuple[int, int], ...]
    hinted: Counts


class ChunkIndex:
    """The index for all instances of one model, with one chunk size and hash.

    Args:
        num_slots: most instances at the same time.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_bytes = (num_slots + 7) // 8
        # Chunk key -> number of its holder set.
        self._table = KeyTable()
        self._sets = HolderSets()
        self._shared = SharedHolders(num_slots)
        self._num_chunks = {slot: [0] * NUM_TIERS for slot in range(num_slots)}
        # Bit mask of the slots that hold chunks, or have held any since they were cleared.
        self._holders = 0
        self._unhealthy = 0
        self._predictions = Predictions(num_slots)
        self._never = np.zeros(num_slots)
        self._never.flags.writeable = False

    def __len__(self) -> int:
        """Number of entries, including those without holders that are not collected yet."""
        return len(self._table)

    @property
    def holders(self) -> int:
        """Bit mask of the instances that hold chunks, or have held any since they were cleared."""
        return self._shared.expand(self._holders)

    def add_shared(self) -> int:
        """Add a holder whose users hold all that it holds. Returns its slot."""
        slot = self._shared.add()
        self._num_chunks[slot] = [0] * NUM_TIERS
        return slot

    def remove_shared(self, shared: int) -> None:
        """Remove a shared holder and all its chunks."""
        self.cleared(shared)
        self.set_healthy(shared, True)
        self._shared.remove(shared)
        del self._num_chunks[shared]

    def join_shared(self, shared: int, slot: int) -> None:
        """Add an instance to the users of a shared holder."""
        self._shared.join(shared, slot)

    def leave_shared(self, shared: int, slot: int) -> None:
        """Remove an instance from the users of a shared holder."""
        self._shared.leave(shared, slot)

    def stored(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """Add chunks that an instance holds now."""
        once = _once(keys)
        if not len(once):
            return
        if slot < self.num_slots and self._predictions.awaits(slot):
            self._predictions.arrived(slot, once.tolist())
        alone = self._sets.including(NO_HOLDERS, slot, tier)
        if self._table.add_new(once, alone.number):
            self._count(slot, tier, len(once))
            alone.num_chunks += len(once)
            return
        self._sets.release(alone)
        for held, same in self._by_holders(once):
            wanted = self._sets.including(held, slot, tier)
            if wanted.masks == held.masks:
                continue
            if held is NO_HOLDERS:
                self._table.add(same, wanted.number)
            else:
                self._table.change(same, wanted.number)
            self._count(slot, tier, len(same))
            self._replace(held, wanted, len(same))

    def removed(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """Remove chunks that an instance no longer holds in a tier."""
        for held, same in self._by_holders(_once(keys)):
            if not held.has(slot, tier):
                continue
            self._count(slot, tier, -len(same))
            wanted = self._sets.excluding(held, slot, tier)
            if wanted.union:
                self._table.change(same, wanted.number)
                self._replace(held, wanted, len(same))
            else:
                self._table.remove(same)
                self._sets.release(wanted)
                self._replace(held, NO_HOLDERS, len(same))

    def cleared(self, slot: int, tier: Tier | None = None) -> None:
        """Remove all chunks of an instance that has cleared its cache, restarted, or is gone.

        The cost is proportional to the number of holder sets. ``collect`` removes the entries that
        have no holders any more.
        """
        self._sets.drop_slot(slot, tier)
        for each in Tier if tier is None else (tier,):
            self._num_chunks[slot][each] = 0
        if tier is None:
            self._holders &= ~(1 << slot)
            if slot < self.num_slots:
                self._predictions.drop_slot(slot)

    def collect(self, num_parts: int = 1) -> int:
        """Remove entries without holders from the next parts (1/256 each) of the table.

        Returns:
            The number of removed entries.
        """
        found = 0
        for _ in range(num_parts):
            keys, numbers = self._table.scan(1 / _NUM_PARTS)
            if not len(keys):
                continue
            sets = self._sets.by_number
            stale = [int(number) for number in np.unique(numbers) if not sets[number].union]
            for number in stale:
                same = keys[numbers == number]
                self._table.remove(same)
                self._replace(sets[number], NO_HOLDERS, len(same))
                found += len(same)
        return found

    def predict(
        self, slot: int, keys: Sequence[int], ready_at: float, expires_at: float
    ) -> Prediction:
        """Predict that an instance will hold chunks at ``ready_at``; ``stored`` confirms it."""
        return self._predictions.add(slot, keys, ready_at, expires_at)

    def retract(self, prediction: Prediction) -> None:
        """End a prediction. Other predictions of the same chunks stay."""
        self._predictions.retract(prediction)

    def set_healthy(self, slot: int, is_healthy: bool) -> None:
        """Set whether the events of an instance have arrived without a gap."""
        bit = 1 << slot
        self._unhealthy = self._unhealthy & ~bit if is_healthy else self._unhealthy | bit

    def num_held(self, slot: int, tier: Tier | None = None) -> int:
        """Number of chunks that an instance holds in a tier, or summed over tiers.

        A chunk in several of the shared holders that it uses counts several times.
        """
        counts = [self._num_chunks[each] for each in (slot, *self._shared.used_by(slot))]
        return sum(sum(each) if tier is None else each[tier] for each in counts)

    def holds(self, slot: int, key: int) -> bool:
        """Whether an instance itself, or a shared holder, holds a chunk in any tier."""
        return bool(self._sets.by_number[self._table.get(key)].union >> slot & 1)

    def num_copies(self, key: int) -> int:
        """Number of instances that hold a chunk."""
        held = self._sets.by_number[self._table.get(key)]
        return self._shared.instances_of(held)[1].bit_count()

    def match(self, keys: Sequence[int], now: float) -> PrefixMatches:
        """Look up which instances hold how much of a prompt with these chunk keys, in order."""
        numbers: list[int] = self._table.find(as_keys(keys)).tolist() if len(keys) else []
        found = self._runs(numbers)
        runs = [(self._shared.instances_of(held), length) for held, length in found]
        expected = self._predictions.masks(keys, now)
        if len(runs) == 1 and expected is None and not self._unhealthy:
            return self._match_of_one(*runs[0])
        local = hinted = self._lengths([(union, length) for (_, union), length in runs])
        if self._unhealthy:
            runs = [(self._trusted(held), length) for held, length in found]
            local = self._lengths([(union, length) for (_, union), length in runs])
        device, host = self._upper_tiers(runs, local)
        predicted, ready_at = self._with_predictions(keys, runs, local, expected)
        pool_runs = _pool(runs)
        return PrefixMatches(
            len(keys),
            device,
            host,
            local,
            predicted,
            ready_at,
            # With a single run, the chunks that an instance holds are its prefix.
            local if len(pool_runs) <= 1 else self._held(pool_runs),
            sum(length for length, _ in pool_runs),
            pool_runs,
            hinted,
        )

    def _trusted(self, held: HolderSet) -> Instances:
        """The instances that hold a set's chunks, without holders whose events have a gap."""
        first, second, third = (mask & ~self._unhealthy for mask in held.masks)
        return self._shared.expand_tiers((first, second, third))

    def _match_of_one(self, held: Instances, length: int) -> PrefixMatches:
        """The match of a prompt whose chunks all have the same holders, without predictions."""
        (device_mask, host_mask, disk_mask), union = held
        local = np.zeros(self.num_slots, np.int64)
        if union:
            self._set(local, union, length)
        host = self._lengths(((device_mask | host_mask, length),)) if disk_mask else local
        device = self._lengths(((device_mask, length),)) if host_mask or disk_mask else local
        found = ((length, union),) if union else ()
        in_pool = length if union else 0
        return PrefixMatches(
            length, device, host, local, local, self._never, local, in_pool, found, local
        )

    def _by_holders(self, once: KeyArray) -> list[tuple[HolderSet, KeyArray]]:
        """Group keys by their holder sets."""
        if not len(once):
            return []
        numbers = self._table.find(once)
        listed = numbers.tolist()
        if listed.count(listed[0]) == len(listed):
            return [(self._sets.by_number[listed[0]], once)]
        return [(self._sets.by_number[n], once[numbers == n]) for n in set(listed)]

    def _count(self, slot: int, tier: Tier, change: int) -> None:
        """Count chunks that an instance holds now, or no longer holds."""
        self._holders |= 1 << slot
        self._num_chunks[slot][tier] += change

    def _replace(self, held: HolderSet, wanted: HolderSet, num_chunks: int) -> None:
        """Move `num_chunks` chunks from one holder set to another."""
        if wanted is not NO_HOLDERS:
            wanted.num_chunks += num_chunks
        if held is not NO_HOLDERS:
            held.num_chunks -= num_chunks
            self._sets.release(held)

    def _runs(self, numbers: list[int]) -> list[tuple[HolderSet, int]]:
        """A prompt's chunks as runs of (holder set, number of chunks)."""
        sets = self._sets.by_number
        if numbers and numbers.count(numbers[0]) == len(numbers):
            return [(sets[numbers[0]], len(numbers))]
        return [(sets[number], len(list(same))) for number, same in groupby(numbers)]

    def _bits(self, mask: int) -> NDArray[np.bool_]:
        """The mask as an array with a flag per slot."""
        raw = np.frombuffer(mask.to_bytes(self._num_bytes, "little"), np.uint8)
        return np.unpackbits(raw, count=self.num_slots, bitorder="little").view(np.bool_)

    def _lengths(self, runs: Iterable[tuple[int, int]]) -> Counts:
        """Leading chunks per slot, from runs of (bit mask of slots, number of chunks)."""
        lengths = np.zeros(self.num_slots, np.int64)
        alive, position = (1 << self.num_slots) - 1, 0
        for mask, length in runs:
            left = alive & mask
            if position and left != alive:
                self._set(lengths, alive ^ left, position)
            alive, position = left, position + length
            if not alive:
                return lengths
        if position:
            self._set(lengths, alive, position)
        return lengths

    def _set(self, lengths: Counts, mask: int, length: int) -> None:
        """Set the length of all slots in the mask; few slots one by one, which is faster."""
        if mask.bit_count() > _FEW:
            lengths[self._bits(mask)] = length
            return
        while mask:
            lengths[(mask & -mask).bit_length() - 1] = length
            mask &= mask - 1

    def _upper_tiers(
        self, runs: list[tuple[Instances, int]], local: Counts
    ) -> tuple[Counts, Counts]:
        """Leading chunks in device memory, and in device or host memory."""
        host = local
        if any(masks[Tier.DISK] for (masks, _), _ in runs):
            host = self._lengths([(masks[0] | masks[1], length) for (masks, _), length in runs])
        device = host
        if any(masks[Tier.HOST] for (masks, _), _ in runs):
            device = self._lengths([(masks[0], length) for (masks, _), length in runs])
        return device, host

    def _held(self, runs: tuple[tuple[int, int], ...]) -> Counts:
        held = np.zeros(self.num_slots, np.int64)
        for length, mask in runs:
            held[self._bits(mask)] += length
        return held

    def _with_predictions(
        self,
        keys: Sequence[int],
        runs: list[tuple[Instances, int]],
        local: Counts,
        expected: list[int] | None,
    ) -> tuple[Counts, NDArray[np.float64]]:
        """``local`` including predicted chunks, and when those will be available."""
        ready_at = np.zeros(self.num_slots)
        if expected is None:
            return local, ready_at
        unions = [union for (_, union), length in runs for _ in range(length)]
        each = [union | mask for union, mask in zip(unions, expected, strict=True)]
        merged = [(mask, len(list(same))) for mask, same in groupby(each)]
        predicted = self._lengths(merged)
        for slot in np.flatnonzero(predicted > local):
            last = keys[int(predicted[slot]) - 1]
            ready_at[slot] = self._predictions.ready_at(last, int(slot))
        return predicted, ready_at


def _once(keys: Iterable[int]) -> KeyArray:
    """The keys without duplicates."""
    given = keys if isinstance(keys, tuple | list) else list(keys)
    distinct = set(given)
    return as_keys(given if len(distinct) == len(given) else list(distinct))


def _pool(runs: list[tuple[Instances, int]]) -> tuple[tuple[int, int], ...]:
    """The leading runs that have holders."""
    found = []
    for (_, mask), length in runs:
        if not mask:
            break
        found.append((length, mask))
    return tuple(found)
