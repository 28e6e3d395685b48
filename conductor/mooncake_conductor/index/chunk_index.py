"""Chunk to instances: filled by events and predictions, asked for the prefixes of a prompt.

What it says is a hint. An instance validates on use, so a stale entry costs a miss, never wrong KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mooncake_conductor.index.holder_sets import (
    NO_HOLDERS,
    NUM_TIERS,
    HolderSet,
    HolderSets,
    Tier,
)
from mooncake_conductor.index.key_table import KeyArray, KeyTable, as_keys
from mooncake_conductor.index.predictions import Prediction, Predictions

_NUM_PARTS = 256
"""Of the table, each of which ``collect`` looks through at once."""

_FEW = 8

Counts = NDArray[np.int64]


class PrefixMatches(Struct, frozen=True, eq=False):
    """What is known of one prompt's chunks; counts in chunks, indexed by instance slot.

    Args:
        num_chunks: that the prompt has.
        device: leading chunks that are in device memory.
        host: leading chunks in device or host memory; at least ``device``.
        local: leading chunks in any tier; at least ``host``.
        predicted: leading chunks, with those that are being computed or fetched.
        ready_at: when the predicted ones will be there, in seconds; 0 where none is awaited.
        held: chunks of the pool's prefix that the instance holds, contiguous or not.
        pool: leading chunks that somebody holds.
        runs: the pool's prefix, as (number of chunks, slots that hold them as bits).
        hinted: ``local`` as instances with an unhealthy index have it; breaks ties only.
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


@dataclass(slots=True)
class Digest:
    """How many chunks an instance is believed to hold, and the XOR of their keys."""

    num_chunks: int = 0
    xor: int = 0


class ChunkIndex:
    """Chunks by key, for all instances of one model, chunk size and hash.

    Args:
        num_slots: how many instances there can be.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_bytes = (num_slots + 7) // 8
        # Key to the number of its set of holders.
        self._table = KeyTable()
        self._sets = HolderSets()
        self._digests = [[Digest() for _ in range(NUM_TIERS)] for _ in range(num_slots)]
        # Slots that hold something, as bits, or did until their last chunk went.
        self.holders = 0
        self._unhealthy = 0
        self._predictions = Predictions(num_slots)
        self._never = np.zeros(num_slots)
        self._never.flags.writeable = False

    def __len__(self) -> int:
        """Entries, including those of instances that are gone and not yet collected."""
        return len(self._table)

    def stored(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """An instance says that it holds these chunks now."""
        once = _once(keys)
        if not len(once):
            return
        if self._predictions.awaits(slot):
            self._predictions.arrived(slot, once.tolist())
        alone = self._sets.including(NO_HOLDERS, slot, tier)
        if self._table.add_new(once, alone.number):
            self._count(slot, tier, once, 1)
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
            self._count(slot, tier, same, 1)
            self._replace(held, wanted, len(same))

    def removed(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """An instance says that it no longer holds these chunks in that tier."""
        for held, same in self._by_holders(_once(keys)):
            if not held.has(slot, tier):
                continue
            self._count(slot, tier, same, -1)
            wanted = self._sets.excluding(held, slot, tier)
            if wanted.union:
                self._table.change(same, wanted.number)
                self._replace(held, wanted, len(same))
            else:
                self._table.remove(same)
                self._sets.release(wanted)
                self._replace(held, NO_HOLDERS, len(same))

    def cleared(self, slot: int, tier: Tier | None = None) -> None:
        """An instance holds nothing any more: it said so, restarted, or is gone.

        Costs as much as there are different sets of holders. Entries that nobody holds are taken
        away by ``collect``.
        """
        self._sets.drop_slot(slot, tier)
        for each in Tier if tier is None else (tier,):
            self._digests[slot][each] = Digest()
        if tier is None:
            self.holders &= ~(1 << slot)
            self._predictions.drop_slot(slot)

    def collect(self, num_parts: int = 1) -> int:
        """Remove entries that nobody holds from the next 256ths; returns how many there were."""
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
        """These chunks will be on that instance at ``ready_at``, if all goes well; ``stored``
        confirms it."""
        return self._predictions.add(slot, keys, ready_at, expires_at)

    def retract(self, prediction: Prediction) -> None:
        """It will not come true, or has ended otherwise; what others predict of the same chunks
        stays."""
        self._predictions.retract(prediction)

    def set_healthy(self, slot: int, is_healthy: bool) -> None:
        """Whether events of that instance have arrived without a gap."""
        bit = 1 << slot
        self._unhealthy = self._unhealthy & ~bit if is_healthy else self._unhealthy | bit

    def digest(self, slot: int, tier: Tier) -> tuple[int, int]:
        """``(number of chunks, XOR of their keys)``, to compare with what the instance says."""
        digest = self._digests[slot][tier]
        return digest.num_chunks, digest.xor

    def num_held(self, slot: int) -> int:
        """How many chunks an instance holds, those in several tiers as often."""
        return sum(digest.num_chunks for digest in self._digests[slot])

    def num_copies(self, key: int) -> int:
        """How many instances hold that chunk."""
        return self._sets.by_number[self._table.get(key)].union.bit_count()

    def match(self, keys: Sequence[int], now: float) -> PrefixMatches:
        """Who holds how much of a prompt with these chunks, in order."""
        numbers: list[int] = self._table.find(as_keys(keys)).tolist() if len(keys) else []
        runs = self._runs(numbers)
        trusted = ~self._unhealthy
        expected = self._predictions.masks(keys, now)
        if len(runs) == 1 and expected is None and not self._unhealthy:
            return self._match_of_one(*runs[0])
        hinted = self._lengths([(held.union, length) for held, length in runs])
        local = hinted
        if self._unhealthy:
            local = self._lengths([(held.union & trusted, length) for held, length in runs])
        device, host = self._upper_tiers(runs, trusted, local)
        predicted, ready_at = self._with_predictions(keys, numbers, local, expected)
        pool_runs = _pool(runs, trusted)
        return PrefixMatches(
            len(keys),
            device,
            host,
            local,
            predicted,
            ready_at,
            # With one run, what an instance holds of it is what it has of the prompt.
            local if len(pool_runs) <= 1 else self._held(pool_runs),
            sum(length for length, _ in pool_runs),
            pool_runs,
            hinted,
        )

    def _match_of_one(self, held: HolderSet, length: int) -> PrefixMatches:
        """Of a prompt all of whose chunks have the same holders, or none; nothing is awaited."""
        union, (device_mask, host_mask, disk_mask) = held.union, held.masks
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
        """These keys by the sets of those that hold them."""
        if not len(once):
            return []
        numbers = self._table.find(once)
        listed = numbers.tolist()
        if listed.count(listed[0]) == len(listed):
            return [(self._sets.by_number[listed[0]], once)]
        return [(self._sets.by_number[n], once[numbers == n]) for n in set(listed)]

    def _count(self, slot: int, tier: Tier, keys: KeyArray, change: int) -> None:
        """These chunks came (+1) or went (-1)."""
        self.holders |= 1 << slot
        digest = self._digests[slot][tier]
        digest.num_chunks += change * len(keys)
        digest.xor ^= int(np.bitwise_xor.reduce(keys))

    def _replace(self, held: HolderSet, wanted: HolderSet, num_chunks: int) -> None:
        """So many chunks have other holders now."""
        if wanted is not NO_HOLDERS:
            wanted.num_chunks += num_chunks
        if held is not NO_HOLDERS:
            held.num_chunks -= num_chunks
            self._sets.release(held)

    def _runs(self, numbers: list[int]) -> list[tuple[HolderSet, int]]:
        """A prompt's chunks as (holders, number of chunks)."""
        sets = self._sets.by_number
        if numbers and numbers.count(numbers[0]) == len(numbers):
            return [(sets[numbers[0]], len(numbers))]
        return [(sets[number], len(list(same))) for number, same in groupby(numbers)]

    def _bits(self, mask: int) -> NDArray[np.bool_]:
        """A flag per slot."""
        raw = np.frombuffer(mask.to_bytes(self._num_bytes, "little"), np.uint8)
        return np.unpackbits(raw, count=self.num_slots, bitorder="little").view(np.bool_)

    def _lengths(self, runs: Iterable[tuple[int, int]]) -> Counts:
        """Leading chunks per slot, from (slots as bits, number of chunks)."""
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
        """Few slots one by one, many at once."""
        if mask.bit_count() > _FEW:
            lengths[self._bits(mask)] = length
            return
        while mask:
            lengths[(mask & -mask).bit_length() - 1] = length
            mask &= mask - 1

    def _upper_tiers(
        self, runs: list[tuple[HolderSet, int]], trusted: int, local: Counts
    ) -> tuple[Counts, Counts]:
        """Leading chunks in device memory, and in device or host memory."""
        host = local
        if any(held.masks[Tier.DISK] for held, _ in runs):
            host = self._lengths(
                [((held.masks[0] | held.masks[1]) & trusted, length) for held, length in runs]
            )
        device = host
        if any(held.masks[Tier.HOST] for held, _ in runs):
            device = self._lengths([(held.masks[0] & trusted, length) for held, length in runs])
        return device, host

    def _held(self, runs: tuple[tuple[int, int], ...]) -> Counts:
        held = np.zeros(self.num_slots, np.int64)
        for length, mask in runs:
            held[self._bits(mask)] += length
        return held

    def _with_predictions(
        self,
        keys: Sequence[int],
        numbers: list[int],
        local: Counts,
        expected: list[int] | None,
    ) -> tuple[Counts, NDArray[np.float64]]:
        """``local`` with the chunks that are under way, and when those will be there."""
        ready_at = np.zeros(self.num_slots)
        if expected is None:
            return local, ready_at
        trusted, sets = ~self._unhealthy, self._sets.by_number
        pairs = zip(numbers, expected, strict=True)
        each = [sets[number].union & trusted | mask for number, mask in pairs]
        merged = [(mask, len(list(same))) for mask, same in groupby(each)]
        predicted = self._lengths(merged)
        for slot in np.flatnonzero(predicted > local):
            last = keys[int(predicted[slot]) - 1]
            ready_at[slot] = self._predictions.ready_at(last, int(slot))
        return predicted, ready_at


def _once(keys: Iterable[int]) -> KeyArray:
    """Each of these keys once."""
    given = keys if isinstance(keys, tuple | list) else list(keys)
    distinct = set(given)
    return as_keys(given if len(distinct) == len(given) else list(distinct))


def _pool(runs: list[tuple[HolderSet, int]], trusted: int) -> tuple[tuple[int, int], ...]:
    """The leading runs that somebody holds."""
    found = []
    for held, length in runs:
        mask = held.union & trusted
        if not mask:
            break
        found.append((length, mask))
    return tuple(found)
