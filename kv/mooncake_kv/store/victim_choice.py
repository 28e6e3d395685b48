"""Chooses the chunks to evict for a new one. Used by ``ChunkTable``. Pure.

The victim is the chunk that the eviction policy names, or a copy that is worth less. If its memory
is too small for the new chunk, the arena has chunks of several sizes. Then a group of adjacent
chunks is evicted: the first one in the policy's order that frees a large enough range, or one of
another group's policy if this one has none. Evicting in policy order alone, until free ranges
happen to be adjacent, could evict most of an arena for one chunk.

Chunks whose memory an earlier reader may still access are not victims: it would be quarantined, so
that the chunks would be lost in vain. When a user's session is lost, that may be most of a store.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field

from mooncake_kv.store.arena_allocator import ArenaAllocator, rounded_up
from mooncake_kv.store.chunk_handles import Entry
from mooncake_kv.store.chunk_store import Chunk, CopyTerms
from mooncake_kv.store.copy_worth import UseCounts, loss_of_last, worth_of_copy
from mooncake_kv.store.eviction import EvictionPolicy

MAX_SKIPPED = 1 << 16
"""Upper bound of the chunks of a group that the searches for a batch skip, before the group is
considered full: as many as one user may pin. It takes some ten milliseconds."""
SKIPPED_PER_VICTIM = 4
"""If a search has to skip many chunks, it finds one victim in advance for this many of them, so
that the searches of a batch don't skip all of them again for each victim. A batch may skip as many
more than MAX_SKIPPED for each of its chunks. The same holds for memory ranges in MAX_NEIGHBOURS."""
MAX_NEIGHBOURS = 4096
"""Upper bound of the memory ranges that the searches of a batch for adjacent victims of a group
examine in vain, which takes a millisecond or two."""

SHARED = ""
"""The group of all tenants without a quota."""
COPIES = "\0copies"
"""The group of the copies that these tenants have fetched from other stores."""


@dataclass(frozen=True, slots=True)
class NoVictim:
    """A search has found that no chunk of a group may be evicted.

    Args:
        until: when an earlier reader of one of them can't access it any more.
        protected: the result applies only to searches that protect this chunk; None: to all.
    """

    until: float
    protected: bytes | None


@dataclass(slots=True)
class Group:
    """The chunks of one tenant with a quota, or of all others.

    Args:
        policy: their order.
        found: victims found in advance.
        none: set while a search would be in vain: none of the chunks has become evictable since
            the last one.
        adjacent: first chunks of adjacent victims, found in advance.
        num_skipped: chunks that the searches for this batch have skipped.
        num_in_vain: memory ranges that they have examined in vain.
        safe_at: when the first reader's quarantine of those that the last search skipped is over.
    """

    policy: EvictionPolicy
    found: deque[Entry] = field(default_factory=deque)
    none: NoVictim | None = None
    adjacent: deque[Entry] = field(default_factory=deque)
    num_skipped: int = 0
    num_in_vain: int = 0
    safe_at: float = math.inf


class VictimChoice:
    """The READY chunks of a table, in the order of their eviction.

    Args:
        policies: eviction policy of each group.
        index: the table's entries by key.
        allocator: the allocator of its arena.
        uses: use counts of chunks, present or not.
    """

    def __init__(
        self,
        policies: Mapping[str, EvictionPolicy],
        index: Mapping[bytes, Entry],
        allocator: ArenaAllocator,
        uses: UseCounts,
    ) -> None:
        self._groups = {name: Group(policy) for name, policy in policies.items()}
        self._index = index
        self._allocator = allocator
        self._uses = uses
        self._ready: dict[int, Entry] = {}  # by offset
        self._before: set[bytes] = set()  # keys before the chunks of this batch
        self._max_skipped = MAX_SKIPPED
        self._max_in_vain = MAX_NEIGHBOURS

    def begin(self, num_chunks: int) -> None:
        """The searches from now on are for another batch, of this many chunks."""
        self._before.clear()
        self._max_skipped = MAX_SKIPPED + SKIPPED_PER_VICTIM * num_chunks
        self._max_in_vain = MAX_NEIGHBOURS + SKIPPED_PER_VICTIM * num_chunks
        for group in self._groups.values():
            group.num_skipped = group.num_in_vain = 0

    def add(self, entry: Entry) -> None:
        """A chunk has become READY."""
        group = self._groups[entry.group]
        group.policy.add(entry.chunk)
        group.found.clear()
        group.adjacent.clear()
        group.none = None
        self._ready[entry.offset] = entry

    def remove(self, entry: Entry) -> None:
        """A chunk was evicted or dropped."""
        group = self._groups[entry.group]
        group.policy.remove(entry.chunk.key)
        group.none = None  # it may have protected the chunks before it
        del self._ready[entry.offset]

    def touch(self, group: str, keys: Sequence[bytes]) -> None:
        """Chunks of a sequence were used; ``keys`` are in its order."""
        self._groups[group].policy.touch(keys)
        self._groups[group].found.clear()
        self._groups[group].adjacent.clear()

    def unused(self, entry: Entry) -> None:
        """A chunk's last reader, or the last write of a chunk after it, has ended."""
        self._groups[entry.group].none = None

    def first(self, name: str, protected: bytes | None, now: float) -> Entry | None:
        """The first chunk of a group that may be evicted; ``protected`` may not."""
        group = self._groups[name]
        found = group.found
        while found:
            entry = found[0]
            if self._ready.get(entry.offset) is not entry:  # it was evicted or dropped
                found.popleft()
            elif _is_evictable(entry, {protected}, now):
                return entry
            else:
                found.clear()
        none = group.none
        if none is not None and now < none.until and none.protected in (None, protected):
            return None
        self._find_first_ones(group, protected, now)
        return found[0] if found else None

    def victims_for(self, chunk: Chunk, now: float) -> list[Entry]:
        """The chunks to evict to free memory for a chunk; empty if that is impossible."""
        parent, found = chunk.parent, []
        for group in self._groups:
            if (entry := self.first(group, parent, now)) is not None:
                found.append(entry)
        if not found:
            return []
        victim = self._least_valuable(found, now) if len(found) > 1 else found[0]
        if rounded_up(victim.chunk.nbytes) >= rounded_up(chunk.nbytes):
            return [victim]
        self._protect_before(chunk)
        in_turn = sorted(found, key=lambda entry: (entry is not victim, entry.used_at))
        for entry in in_turn:
            if adjacent := self._first_adjacent(self._groups[entry.group], chunk, now):
                return adjacent
        return []

    def is_worth(self, chunk: Chunk, copy: CopyTerms, victims: Sequence[Entry], now: float) -> bool:
        """Whether a copy is worth more than the victims that it would evict."""
        worth = worth_of_copy(self._uses.uses(chunk.key, now), copy)
        return worth > sum(self._loss(victim, chunk, copy, now) for victim in victims)

    # -- inside ---------------------------------------------------------------------------------

    def _find_first_ones(self, group: Group, protected: bytes | None, now: float) -> None:
        """Find the first chunks of a group that may be evicted, one after the other; one, or more
        if many others come before it."""
        num_skipped, group.safe_at, group.none = group.num_skipped, math.inf, None
        for entry in self._in_order(group, {protected}, now):
            group.found.append(entry)
            if len(group.found) * SKIPPED_PER_VICTIM >= group.num_skipped - num_skipped:
                break
        if not group.found and group.num_skipped < self._max_skipped:
            group.none = NoVictim(group.safe_at, self._needed(protected, now))

    def _needed(self, protected: bytes | None, now: float) -> bytes | None:
        """``protected``, unless that chunk could not be evicted anyway."""
        entry = self._index.get(protected) if protected is not None else None
        if entry is None or self._ready.get(entry.offset) is not entry:
            return None
        return protected if _is_evictable(entry, frozenset(), now) else None

    def _in_order(self, group: Group, blocked: set[bytes | None], now: float) -> Iterator[Entry]:
        """Yield the chunks of a group that may be evicted, in its policy's order.

        A chunk that may not be evicted protects all chunks before it in its sequence, without which
        it would be useless: their keys are added to ``blocked``.
        """
        if group.num_skipped >= self._max_skipped:
            return
        for key in group.policy.victims():
            entry = self._index[key]
            if _is_evictable(entry, blocked, now):
                yield entry
                continue
            group.num_skipped += 1
            if entry.unsafe_until > now:
                group.safe_at = min(group.safe_at, entry.unsafe_until)
            if entry.chunk.parent is not None:
                blocked.add(entry.chunk.parent)
            if group.num_skipped >= self._max_skipped:
                return

    def _first_adjacent(self, group: Group, chunk: Chunk, now: float) -> list[Entry]:
        """The first adjacent chunks, in a group's order, whose memory fits a chunk."""
        while group.adjacent:
            first = group.adjacent.popleft()
            if self._ready.get(first.offset) is first:  # it was not evicted or dropped
                found, num_ranges = self._adjacent_to(first, chunk, now)
                if found:
                    return found
                group.num_in_vain += num_ranges
        self._find_adjacent(group, chunk, now)
        return self._adjacent_to(group.adjacent.popleft(), chunk, now)[0] if group.adjacent else []

    def _find_adjacent(self, group: Group, chunk: Chunk, now: float) -> None:
        """Find the first adjacent chunks of a group whose memory fits a chunk; more of them, which
        share none, if many ranges were examined in vain before."""
        taken: set[int] = set()
        blocked = {chunk.parent}
        num_before = group.num_skipped + group.num_in_vain
        for first in self._in_order(group, blocked, now):
            if first.offset in taken:
                continue
            found, num_ranges = self._adjacent_to(first, chunk, now)
            offsets = [entry.offset for entry in found]
            if found and taken.isdisjoint(offsets):
                group.adjacent.append(first)
                taken.update(offsets)
            else:
                group.num_in_vain += num_ranges
                blocked.add(first.chunk.parent)
            num_passed = group.num_skipped + group.num_in_vain - num_before
            if (
                len(group.adjacent) * SKIPPED_PER_VICTIM >= num_passed
                or group.num_in_vain >= self._max_in_vain
            ):
                break

    def _adjacent_to(self, first: Entry, chunk: Chunk, now: float) -> tuple[list[Entry], int]:
        """The chunks from ``first`` on whose memory, with the free ranges between them, fits a
        chunk; none if others are in between. And the number of ranges examined."""
        found: list[Entry] = []
        nbytes, num_ranges = rounded_up(chunk.nbytes), 0
        for offset, length, is_free in self._allocator.ranges_from(first.offset):
            num_ranges += 1
            if not is_free:
                entry = self._ready.get(offset)
                if entry is None or not _is_evictable(entry, self._before, now):
                    break
                found.append(entry)
            nbytes -= length
            if nbytes <= 0 and found:
                return found, num_ranges
        return [], num_ranges

    def _protect_before(self, chunk: Chunk) -> None:
        """Protect the chunks before this one in its sequence, as far back as all are present."""
        key = chunk.parent
        while key is not None and key not in self._before:
            entry = self._index.get(key)
            if entry is None:
                break
            self._before.add(key)
            key = entry.chunk.parent

    def _least_valuable(self, candidates: Sequence[Entry], now: float) -> Entry:
        """The chunk to evict: the oldest candidate, or a copy that is worth less than that."""
        oldest = min(candidates, key=lambda entry: entry.used_at)
        for spare in candidates:
            if spare.copy is not None and spare.group == COPIES:
                worth = worth_of_copy(self._uses.uses(spare.chunk.key, now), spare.copy)
                return (
                    spare if worth <= self._loss(oldest, spare.chunk, spare.copy, now) else oldest
                )
        return oldest

    def _loss(self, victim: Entry, chunk: Chunk, terms: CopyTerms, now: float) -> float:
        """Expected cost in seconds of losing a victim; ``chunk``, ``terms``: see
        ``loss_of_last``."""
        uses = self._uses.uses(victim.chunk.key, now)
        if victim.copy is not None:
            return worth_of_copy(uses, victim.copy)
        return loss_of_last(uses, victim.chunk, chunk, terms)


def _is_evictable(entry: Entry, protected: AbstractSet[bytes | None], now: float) -> bool:
    """Whether a READY chunk may be evicted, and its memory would be free at once."""
    is_used = entry.num_pins or entry.num_staging_children or entry.unsafe_until > now
    return not is_used and entry.chunk.key not in protected
