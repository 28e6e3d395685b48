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
more than MAX_SKIPPED for each of its chunks."""
MAX_NEIGHBOURS = 4096
"""Upper bound of the memory ranges that the search for adjacent victims examines, which takes a
millisecond or two."""

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
        num_skipped: chunks that the searches for this batch have skipped.
        safe_at: when the first reader's quarantine of those that the last search skipped is over.
    """

    policy: EvictionPolicy
    found: deque[Entry] = field(default_factory=deque)
    none: NoVictim | None = None
    num_skipped: int = 0
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
        self._max_skipped = MAX_SKIPPED

    def begin(self, num_chunks: int) -> None:
        """The searches from now on are for another batch, of this many chunks."""
        self._max_skipped = MAX_SKIPPED + SKIPPED_PER_VICTIM * num_chunks
        for group in self._groups.values():
            group.num_skipped = 0

    def add(self, entry: Entry) -> None:
        """A chunk has become READY."""
        group = self._groups[entry.group]
        group.policy.add(entry.chunk)
        group.found.clear()
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
        in_turn = sorted(found, key=lambda entry: (entry is not victim, entry.used_at))
        for entry in in_turn:
            if room := self._neighbours(entry.group, chunk, now, MAX_NEIGHBOURS // len(found)):
                return room
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

    def _neighbours(self, group: str, chunk: Chunk, now: float, left: int) -> list[Entry]:
        """Find adjacent chunks whose memory, with the free ranges between them, fits a chunk.

        Args:
            group: the group whose order gives the first of these chunks.
            chunk: the chunk to make memory available for.
            now: the time.
            left: upper bound of the memory ranges to examine.
        """
        nbytes, protected = rounded_up(chunk.nbytes), self._sequence_before(chunk)
        blocked = {chunk.parent}
        for first in self._in_order(self._groups[group], blocked, now):
            found: list[Entry] = []
            total = 0
            for offset, length, is_free in self._allocator.ranges_from(first.offset):
                left -= 1
                if not is_free:
                    entry = self._ready.get(offset)
                    if entry is None or not _is_evictable(entry, protected, now):
                        break
                    found.append(entry)
                total += length
                if total >= nbytes and found:
                    return found
            if left <= 0:
                break
            blocked.add(first.chunk.parent)
        return []

    def _sequence_before(self, chunk: Chunk) -> set[bytes]:
        """Keys of the chunks before this one in its sequence, as far back as all are present."""
        found: set[bytes] = set()
        key = chunk.parent
        while key is not None and key not in found and (entry := self._index.get(key)) is not None:
            found.add(key)
            key = entry.chunk.parent
        return found

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
