"""Which chunks have to go for another one. Pure.

What goes is what an eviction policy says, or a copy that is worth less. Where that has not room for
the new chunk, chunks of several sizes are in one arena: then those go that lie side by side there,
from the first one on in the policy's order that has such neighbours; of another group, if none of
that one's has. Evicting in that order alone until the holes happen to meet would take most of an
arena along, for one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set as AbstractSet

from mooncake_kv.store.arena_allocator import ArenaAllocator, rounded_up
from mooncake_kv.store.chunk_handles import Entry
from mooncake_kv.store.chunk_store import Chunk, CopyTerms
from mooncake_kv.store.copy_worth import UseCounts, loss_of_last, worth_of_copy
from mooncake_kv.store.eviction import EvictionPolicy

MAX_SKIPPED_VICTIMS = 4096
"""How many chunks that can't go an eviction looks past, before the store counts as full."""
MAX_NEIGHBOURS = 4096
"""How many ranges of memory it looks at for some that lie side by side: a millisecond or two."""

SHARED = ""
"""The group of all tenants that have no quota."""
COPIES = "\0copies"
"""The group of what they have fetched from other stores."""


class VictimChoice:
    """The chunks of a table that are ready, in the order in which they go.

    Args:
        policies: by group.
        index: the table's chunks by key.
        allocator: of its memory.
        uses: of chunks, here or not.
    """

    def __init__(
        self,
        policies: Mapping[str, EvictionPolicy],
        index: Mapping[bytes, Entry],
        allocator: ArenaAllocator,
        uses: UseCounts,
    ) -> None:
        self._policies = policies
        self._index = index
        self._allocator = allocator
        self._uses = uses
        self._ready: dict[int, Entry] = {}  # by offset

    def add(self, entry: Entry) -> None:
        """It is ready."""
        self._policies[entry.group].add(entry.chunk)
        self._ready[entry.offset] = entry

    def remove(self, entry: Entry) -> None:
        """It has gone."""
        self._policies[entry.group].remove(entry.chunk.key)
        del self._ready[entry.offset]

    def touch(self, group: str, keys: Sequence[bytes]) -> None:
        """Chunks of a sequence were used, in its order."""
        self._policies[group].touch(keys)

    def first(self, group: str, kept: bytes | None) -> Entry | None:
        """The first one of a group that may go; ``kept`` may not."""
        for entry in self._in_order(group, kept):
            return entry
        return None

    def for_room(self, chunk: Chunk, now: float) -> list[Entry]:
        """What has to go so that there is memory for a chunk; none: there won't be.

        If the one whose turn it is has memory enough, it may rest for a while yet: then it is
        another one's turn when it has gone.
        """
        parent, found = chunk.parent, []
        for group in self._policies:
            if (entry := self.first(group, parent)) is not None:
                found.append(entry)
        if not found:
            return []
        victim = self._least_worth(found, now) if len(found) > 1 else found[0]
        if rounded_up(victim.chunk.nbytes) >= rounded_up(chunk.nbytes):
            return [victim]
        in_turn = sorted(found, key=lambda entry: (entry is not victim, entry.used_at))
        for entry in in_turn:
            if room := self._neighbours(entry.group, chunk, now, MAX_NEIGHBOURS // len(found)):
                return room
        return []

    def is_worth(self, chunk: Chunk, copy: CopyTerms, victims: Sequence[Entry], now: float) -> bool:
        """Whether a copy is worth more than what would have to go for it."""
        worth = worth_of_copy(self._uses.uses(chunk.key, now), copy)
        return worth > sum(self._loss(victim, chunk, copy, now) for victim in victims)

    # -- inside ---------------------------------------------------------------------------------

    def _in_order(self, group: str, kept: bytes | None) -> Iterator[Entry]:
        """Chunks in a policy's order that may go.

        One that may not go takes all before it in its sequence along: without those it would be of
        no use.
        """
        blocked = {kept}
        for count, key in enumerate(self._policies[group].victims()):
            entry = self._index[key]
            if key not in blocked and not entry.num_pins and not entry.num_staging_children:
                yield entry
            if entry.chunk.parent is not None:
                blocked.add(entry.chunk.parent)
            if count >= MAX_SKIPPED_VICTIMS:
                break

    def _neighbours(self, group: str, chunk: Chunk, now: float, left: int) -> list[Entry]:
        """Chunks that may go and lie side by side where there is memory enough, from one of a group
        on, and free memory between them; ``left`` ranges are looked at for that."""
        nbytes, kept = rounded_up(chunk.nbytes), self._sequence_before(chunk)
        for first in self._in_order(group, chunk.parent):
            found: list[Entry] = []
            total = 0
            for offset, length, is_free in self._allocator.ranges_from(first.offset):
                left -= 1
                if not is_free:
                    entry = self._ready.get(offset)
                    if entry is None or not _may_go(entry, kept, now):
                        break
                    found.append(entry)
                total += length
                if total >= nbytes and found:
                    return found
            if left <= 0:
                break
        return []

    def _sequence_before(self, chunk: Chunk) -> set[bytes]:
        """Keys of the chunks that are there before this one in its sequence."""
        found: set[bytes] = set()
        key = chunk.parent
        while key is not None and key not in found and (entry := self._index.get(key)) is not None:
            found.add(key)
            key = entry.chunk.parent
        return found

    def _least_worth(self, candidates: Sequence[Entry], now: float) -> Entry:
        """The one to go: the oldest, or a copy that is worth less than it."""
        oldest = min(candidates, key=lambda entry: entry.used_at)
        for spare in candidates:
            if spare.copy is not None and spare.group == COPIES:
                worth = worth_of_copy(self._uses.uses(spare.chunk.key, now), spare.copy)
                return (
                    spare if worth <= self._loss(oldest, spare.chunk, spare.copy, now) else oldest
                )
        return oldest

    def _loss(self, victim: Entry, chunk: Chunk, terms: CopyTerms, now: float) -> float:
        """Seconds that a victim's loss costs; ``chunk`` and ``terms`` as in ``loss_of_last``."""
        uses = self._uses.uses(victim.chunk.key, now)
        if victim.copy is not None:
            return worth_of_copy(uses, victim.copy)
        return loss_of_last(uses, victim.chunk, chunk, terms)


def _may_go(entry: Entry, kept: AbstractSet[bytes], now: float) -> bool:
    """Whether a chunk that is ready may go, and its memory is free at once then."""
    is_used = entry.num_pins or entry.num_staging_children or entry.unsafe_until > now
    return not is_used and entry.chunk.key not in kept
