"""What is in a store's memory, who may read or write it, and until when. Pure: the clock is an
argument, and no byte is touched.

    STAGING --commit--> READY --evicted or dropped--> EVICTING --last reader ended--> free
       \\--abort, or its writer is gone------------------------------------------/

Readers and writers are one-sided: nothing here can stop them. So memory is used again only when

* all its readers ended, or their deadlines are past by the user's quarantine; what such a reader
  has read is not valid, and ``release`` says so;
* its writer said that nothing of it moves any more, or is known to be gone for a quarantine. A
  writer past its deadline, or without a session, can't commit any more, but its memory stays with
  it, ABANDONED: a late byte would land in somebody else's chunk, and nobody would notice. A writer
  without a session is not gone: it may be frozen in the middle of a copy, and be thawed at any
  time. Who knows that its processes have ended calls ``end_user``; see ``store_service``.

The quarantine is for what was sent and has not landed, and longer for reads that may take longer.

Users come with batches, a prompt's chunks at once. Each method goes over its batch once, and makes
one lease, one range of memory and one message to the observer of it where it can.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_kv.store.arena_allocator import ArenaAllocator, rounded_up
from mooncake_kv.store.chunk_handles import ChunkHandles, ChunkState, Entry, Lease
from mooncake_kv.store.chunk_store import (
    MAX_LEASE_S,
    Chunk,
    CopyTerms,
    PutRefusal,
    ReadHandle,
    Residence,
    StoreObserver,
    StoreStats,
    Tier,
    WriteHandle,
)
from mooncake_kv.store.copy_worth import PUT_USES, UseCounts
from mooncake_kv.store.eviction import EvictionPolicy
from mooncake_kv.store.victim_choice import COPIES, SHARED, VictimChoice

MAX_FREED = 4
"""How many times its own size is freed for a chunk, should no part of that have room for it."""
QUARANTINE_MARGIN_S = 10.0
"""A transfer's time begins when its rank has the order; copies look at the clock between pieces."""

_ENDS_A_SEQUENCE = {
    PutRefusal.NO_ROOM,
    PutRefusal.OVER_QUOTA,
    PutRefusal.TOO_LARGE,
    PutRefusal.NOT_WORTH_IT,
}

_STAGING, _READY, _EVICTING, _ABANDONED = ChunkState
"""Named here since a member that is looked up in its Enum costs a fifth of a microsecond, which a
batch would pay for every chunk."""


@dataclass(frozen=True, slots=True)
class TableSettings:
    """How a table behaves.

    Args:
        make_policy: a new eviction policy; one per tenant with a quota, and one for all others.
        quarantine_s: how long memory rests after a reader went silent or a writer ended; longer for
            readers whose transfers may take longer, see ``set_transfer_timeout``.
        quotas: bytes by tenant. A tenant that is not named here has no limit of its own.
    """

    make_policy: Callable[[], EvictionPolicy]
    quarantine_s: float = 30.0
    quotas: Mapping[str, int] = field(default_factory=dict)


class TableObserver(StoreObserver, Protocol):
    """Follows a table more closely than a store's users may."""

    def staging(self, keys: Sequence[bytes]) -> None:
        """Chunks are being written to memory; ``committed`` or ``unstaged`` follows for each."""
        ...

    def unstaged(self, key: bytes) -> None:
        """One is written no longer, and is not stored."""
        ...

    def committed(self, chunks: Sequence[Chunk]) -> None:
        """These are stored in memory now: ``stored`` is not said of them besides."""
        ...


class NoObserver:
    """Follows nothing."""

    def staging(self, keys: Sequence[bytes]) -> None:
        """Nobody follows."""

    def unstaged(self, key: bytes) -> None:
        """Nobody follows."""

    def committed(self, chunks: Sequence[Chunk]) -> None:
        """Nobody follows."""

    def stored(self, tier: Tier, chunks: Sequence[Chunk]) -> None:
        """Nobody follows."""

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Nobody follows."""


class ChunkTable:
    """The chunks of one arena. Not thread-safe: its owner has the lock.

    Args:
        capacity: bytes of the arena.
        settings: see there.
        observer: told what memory holds, and what is being written there.
    """

    def __init__(
        self, capacity: int, settings: TableSettings, observer: TableObserver | None = None
    ) -> None:
        self.stats = StoreStats()
        self.observer: TableObserver = observer or NoObserver()
        self._settings = settings
        self._allocator = ArenaAllocator(capacity)
        self._uses = UseCounts()
        self._used_bytes = dict.fromkeys((SHARED, COPIES, *settings.quotas), 0)
        self._index: dict[bytes, Entry] = {}
        policies = {group: settings.make_policy() for group in self._used_bytes}
        self._victims = VictimChoice(policies, self._index, self._allocator, self._uses)
        self._evicting: dict[int, Entry] = {}
        self._handles = ChunkHandles()
        self._quarantine: list[tuple[float, int]] = []
        self._quarantine_s: dict[int, float] = {}  # of users that said what their transfers take
        self._last_generation = 0

    # -- reading --------------------------------------------------------------------------------

    def probe(self, keys: Sequence[bytes]) -> list[Residence]:
        """What is there; changes nothing."""
        found = [self._index.get(key) for key in keys]
        return [
            Residence.ABSENT
            if entry is None
            else (Residence.DRAM if entry.state is _READY else Residence.STAGING)
            for entry in found
        ]

    def pin(
        self,
        keys: Sequence[bytes],
        user: int,
        lease_s: float,
        now: float,
        *,
        are_arriving: bool = False,
    ) -> list[ReadHandle | None]:
        """Grant reads of those that are ready; does not count as use, see ``touch``.

        Args:
            keys, user, lease_s: of what, whose, and until when.
            now: the time.
            are_arriving: grant reads of those that are being written, instead: they are valid if
                the write is committed before they end.
        """
        self.expire(now)
        lease_s, index = _bounded(lease_s), self._index
        wanted = _STAGING if are_arriving else _READY
        found = [index.get(key) for key in keys]
        ready = [entry for entry in found if entry is not None and entry.state is wanted]
        numbers = iter(self._handles.grant(ready, user, now + lease_s, is_write=False))
        handles: list[ReadHandle | None] = []
        pinned_bytes = 0
        for key, entry in zip(keys, found, strict=True):
            number = None
            if entry is not None and entry.state is wanted:
                number = next(numbers, None)
            if entry is None or number is None:
                handles.append(None)
                continue
            entry.num_pins += 1
            nbytes = entry.chunk.nbytes
            pinned_bytes += nbytes
            handles.append(ReadHandle(number, key, entry.offset, nbytes, entry.generation, lease_s))
        self.stats.pinned_bytes += pinned_bytes if user else 0
        return handles

    def release(self, handle_ids: Sequence[int], user: int, now: float) -> list[bool]:
        """End reads; whether each was in force until now."""
        self.expire(now)
        valid = []
        for entry in self._handles.take(handle_ids, user, is_write=False):
            if entry is not None:
                entry.num_pins -= 1
                if entry.state is _READY:
                    valid.append(True)
                    continue
                self._free_if_unread(entry, now)
            valid.append(False)
        self.stats.num_invalid_reads += valid.count(False)
        return valid

    def extend(self, handle_ids: Sequence[int], user: int, lease_s: float, now: float) -> None:
        """Have a user's reads that are in force last ``lease_s`` from now."""
        self._handles.extend(handle_ids, user, now + _bounded(lease_s))

    def is_held(self, handle_id: int, user: int, now: float) -> bool:
        """Whether a handle is in force, so that its memory has been the chunk's until now."""
        return self._handles.is_held(handle_id, user, now)

    def touch(self, keys: Sequence[bytes], now: float) -> None:
        """Count a use of a sequence; keys that aren't there are passed over."""
        groups: dict[str, list[bytes]] = {}
        for key in keys:
            entry = self._index.get(key)
            if entry is not None and entry.state is _READY:
                entry.used_at = now
                entry.num_uses += 1
                groups.setdefault(entry.group, []).append(key)
        for group, members in groups.items():
            self._uses.note(members, now)
            self._victims.touch(group, members)

    # -- writing --------------------------------------------------------------------------------

    def reserve(
        self,
        chunks: Sequence[Chunk],
        user: int,
        lease_s: float,
        now: float,
        copy: CopyTerms | None = None,
        *,
        is_use: bool = True,
    ) -> list[WriteHandle | PutRefusal]:
        """Memory for each of a sequence's chunks, or why not. Those that are there are touched,
        unless it is no use of them; then the next one is the first use of what is put.

        Where one finds no memory, those behind it get none: they would be of no use without it.
        """
        self.expire(now)
        if is_use:
            self.touch([chunk.key for chunk in chunks], now)
        missing: dict[bytes, int] = {}
        for chunk in chunks:  # of one that is named twice, the first is staged
            if chunk.key not in self._index:
                missing.setdefault(chunk.key, chunk.nbytes)
        self._uses.note(missing, now, PUT_USES if copy is None else 1.0)
        lease_s, num_left = _bounded(lease_s), self._handles.num_left(user)
        offsets = self._allocate_together(list(missing.values())[:num_left])
        found: list[Entry | PutRefusal] = []
        staged: list[Entry] = []
        ending = None
        for chunk in chunks:
            if ending is None and len(staged) == num_left:
                ending = PutRefusal.NO_ROOM
            outcome = ending or self._stage(chunk, offsets, now, copy)
            found.append(outcome)
            if isinstance(outcome, Entry):
                outcome.num_uses = int(is_use)
                staged.append(outcome)
            else:
                refused = self.stats.num_refused_puts
                refused[outcome.value] = refused.get(outcome.value, 0) + 1
                ending = outcome if outcome in _ENDS_A_SEQUENCE else None
        numbers = iter(self._handles.grant(staged, user, now + lease_s, is_write=True))
        self.observer.staging([entry.chunk.key for entry in staged])
        return [
            WriteHandle(next(numbers), o.chunk.key, o.offset, o.chunk.nbytes, o.generation, lease_s)
            if isinstance(o, Entry)
            else o
            for o in found
        ]

    def commit(self, handle_ids: Sequence[int], user: int, now: float) -> list[bool]:
        """Writes that are complete become readable. False: too late, or unknown."""
        entries = self._end_writes(handle_ids, user, now)
        stored = []
        for entry in entries:
            if entry is not None:
                entry.state, entry.used_at = _READY, now
                if entry.parent is not None:
                    self._leave_parent(entry)
                self._victims.add(entry)
                stored.append(entry.chunk)
        self.stats.num_puts += len(stored)
        self.stats.put_bytes += sum([chunk.nbytes for chunk in stored])
        self.observer.committed(stored)
        return [entry is not None for entry in entries]

    def abort(self, handle_ids: Sequence[int], user: int, now: float) -> list[bool]:
        """Writes that ended incomplete; their memory is free at once."""
        entries = self._end_writes(handle_ids, user, now)
        for entry in entries:
            if entry is not None:
                self._give_up_write(entry)
                self._free_unwritten(entry, now)
        return [entry is not None for entry in entries]

    # -- leaving --------------------------------------------------------------------------------

    def drop(self, keys: Sequence[bytes], now: float) -> int:
        """Forget chunks, whoever reads them; returns how many were there."""
        found = [self._index.get(key) for key in dict.fromkeys(keys)]
        ready = [e for e in found if e is not None and e.state is _READY]
        for entry in ready:
            self._evict(entry, "drop", now)
        return len(ready)

    def set_transfer_timeout(self, user: int, timeout_s: float) -> None:
        """A user's transfers take no longer than this: what it may read rests until then."""
        needed_s = timeout_s + QUARANTINE_MARGIN_S
        self._quarantine_s[user] = max(needed_s, self._settings.quarantine_s)

    def abandon_user(self, user: int, now: float) -> bool:
        """A user has lost its session: its reads end, its writes won't be stored, and their memory
        stays with it. Whether there is any: ``end_user`` or ``abort`` must follow then."""
        self.expire(now)
        reads = list(self._handles.of_user(user, is_write=False))
        until = now + self._quarantine_of(user)
        for entry in self._handles.take(reads, user, is_write=False):
            if entry is not None:
                self._end_read(entry, until, now)
        writes = self._handles.of_user(user, is_write=True)
        for entry in writes.values():
            self._give_up_write(entry)
            entry.state = _ABANDONED
        return bool(writes)

    def resume_user(self, user: int, writing: Collection[int], now: float) -> None:
        """An abandoned user is back: of its writes nothing moves any more but of these handles."""
        ended = self._handles.of_user(user, is_write=True).keys() - set(writing)
        self.abort(list(ended), user, now)

    def end_user(self, user: int, now: float, *, is_drained: bool) -> None:
        """A user is gone, and starts nothing any more; ``is_drained``: nothing moves either."""
        self.expire(now)
        for entry, is_write in self._handles.end_user(user):
            if is_write:
                rests_s = 0.0 if is_drained else self._settings.quarantine_s
                entry.unsafe_until = max(entry.unsafe_until, now + rests_s)
                self._give_up_write(entry)
                self._free_unwritten(entry, now)
            else:
                rests_s = 0.0 if is_drained else self._quarantine_of(user)
                self._end_read(entry, now + rests_s, now)
        self._quarantine_s.pop(user, None)

    def expire(self, now: float) -> None:
        """End the handles whose deadlines have passed, and the quarantine of what rested."""
        for lease in self._handles.expired(now):
            if lease.is_write:
                self._abandon(lease)
            else:
                self._end_late_reads(lease, now)
        while self._quarantine and self._quarantine[0][0] <= now:
            self._allocator.free(heapq.heappop(self._quarantine)[1])

    # -- looking --------------------------------------------------------------------------------

    def entry(self, key: bytes) -> Entry | None:
        """A chunk that is in memory and readable."""
        entry = self._index.get(key)
        return entry if entry is not None and entry.state is _READY else None

    def has_readers(self, key: bytes) -> bool:
        """Whether anybody may read a chunk that is there, or is being written."""
        entry = self._index.get(key)
        return entry is not None and entry.num_pins > 0

    def ready_chunks(self) -> Iterator[Chunk]:
        """All that can be found, in no order."""
        return (e.chunk for e in self._index.values() if e.state is _READY)

    def fill_levels(self, stats: StoreStats) -> None:
        """Set the levels of ``stats`` to what there is now."""
        stats.capacity_bytes = self._allocator.capacity
        stats.free_bytes = self._allocator.free_bytes
        resting = (self._allocator.allocated_bytes(offset) for _, offset in self._quarantine)
        stats.quarantine_bytes = sum(resting)
        handles = list(self._handles.all())
        writes = [entry for entry, is_write in handles if is_write]
        given_up = [rounded_up(e.chunk.nbytes) for e in writes if e.state is _ABANDONED]
        stats.abandoned_bytes = sum(given_up)
        stats.num_staging = len(writes) - len(given_up)
        stats.num_chunks = len(self._index) - stats.num_staging
        stats.num_pins = len(handles) - len(writes)

    def check_integrity(self) -> None:
        """Prove that no byte is lost or owned twice, and that handles and chunks agree.

        Raises:
            AssertionError: they don't.
        """
        self._allocator.check_integrity()
        self._handles.check_integrity()
        handles = list(self._handles.all())
        abandoned = [e for e, is_write in handles if is_write and e.state is _ABANDONED]
        held = [*self._index.values(), *self._evicting.values(), *abandoned]
        owners = [entry.offset for entry in held]
        owners += [offset for _, offset in self._quarantine]
        assert len(set(owners)) == len(owners), "a range of memory is owned twice"
        owned_bytes = sum(self._allocator.allocated_bytes(offset) for offset in owners)
        total = owned_bytes + self._allocator.free_bytes
        assert total == self._allocator.capacity, "free bytes don't conserve"
        pins = dict.fromkeys((entry.generation for entry in held), 0)
        for entry, is_write in handles:
            if not is_write:
                pins[entry.generation] += 1
            elif entry.state is not _ABANDONED:
                assert self._index[entry.chunk.key] is entry, "a write lost its chunk"
        for entry in held:
            assert entry.num_pins == pins[entry.generation], "pins and handles disagree"
        used = dict.fromkeys(self._used_bytes, 0)
        for entry in held:
            used[entry.group] += rounded_up(entry.chunk.nbytes)
        assert used == self._used_bytes, "a tenant's bytes are miscounted"

    # -- inside ---------------------------------------------------------------------------------

    def _abandon(self, lease: Lease) -> None:
        """Writes that are past their deadline: their chunks won't come, their memory stays."""
        self.stats.num_expired_writes += len(lease.entries)
        for entry in lease.entries.values():
            self._give_up_write(entry)
            entry.state = _ABANDONED

    def _end_late_reads(self, lease: Lease, now: float) -> None:
        self.stats.num_expired_reads += len(lease.entries)
        silent_until = lease.deadline + self._quarantine_of(lease.user)
        for entry in lease.entries.values():
            self._end_read(entry, silent_until, now)

    def _end_read(self, entry: Entry, unsafe_until: float, now: float) -> None:
        """One that did not say so: its reader may go on until then."""
        entry.unsafe_until = max(entry.unsafe_until, unsafe_until)
        entry.num_pins -= 1
        self._free_if_unread(entry, now)

    def _quarantine_of(self, user: int) -> float:
        return self._quarantine_s.get(user, self._settings.quarantine_s)

    def _end_writes(self, handle_ids: Sequence[int], user: int, now: float) -> list[Entry | None]:
        """The chunk of each write that was in force until now; the memory of a late one is free."""
        self.expire(now)
        entries = self._handles.take(handle_ids, user, is_write=True)
        for position, entry in enumerate(entries):
            if entry is not None and entry.state is _ABANDONED:
                self._free_unwritten(entry, now)
                entries[position] = None
        return entries

    def _allocate_together(self, sizes: Sequence[int]) -> Iterator[int]:
        """Offsets for those of a batch that there is memory for without evicting anything."""
        if self._settings.quotas or len(set(sizes)) != 1:
            return iter(())
        return iter(self._allocator.allocate_many(sizes[0], len(sizes)))

    def _stage(
        self, chunk: Chunk, offsets: Iterator[int], now: float, copy: CopyTerms | None
    ) -> Entry | PutRefusal:
        """Memory for a chunk that is not there: the next of ``offsets``, or what is found."""
        present = self._index.get(chunk.key)
        if present is not None:
            return PutRefusal.PRESENT if present.state is _READY else PutRefusal.STAGING
        group = SHARED if copy is None else COPIES
        if chunk.tenant in self._settings.quotas:
            group = chunk.tenant
        offset = next(offsets, None)
        if offset is None:
            found = self._find_memory(chunk, group, now, copy)
            if isinstance(found, PutRefusal):
                return found
            offset = found
        self._last_generation += 1
        entry = Entry(chunk, offset, self._last_generation, _STAGING, now, group, copy)
        self._index[chunk.key] = entry
        self._used_bytes[group] += rounded_up(chunk.nbytes)
        if chunk.parent is not None and (parent := self._index.get(chunk.parent)) is not None:
            entry.parent = parent
            parent.num_staging_children += 1
        return entry

    def _find_memory(
        self, chunk: Chunk, group: str, now: float, copy: CopyTerms | None
    ) -> int | PutRefusal:
        """Allocate, evicting what has to go for it."""
        nbytes = rounded_up(chunk.nbytes)
        if nbytes > self._allocator.capacity:
            return PutRefusal.TOO_LARGE
        quota = self._settings.quotas.get(group)
        if quota is not None and nbytes > quota:
            return PutRefusal.OVER_QUOTA
        while quota is not None and self._used_bytes[group] + nbytes > quota:
            victim = self._victims.first(group, chunk.parent)
            if victim is None:
                return PutRefusal.OVER_QUOTA
            if copy is not None and not self._victims.is_worth(chunk, copy, [victim], now):
                return PutRefusal.NOT_WORTH_IT
            self._evict(victim, "quota", now)
        freed = 0
        while (offset := self._allocator.allocate(nbytes)) is None:
            victims = self._victims.for_room(chunk, now) if freed < MAX_FREED * nbytes else []
            if not victims:
                return PutRefusal.NO_ROOM
            if copy is not None and not self._victims.is_worth(chunk, copy, victims, now):
                return PutRefusal.NOT_WORTH_IT
            for victim in victims:
                freed += rounded_up(victim.chunk.nbytes) if victim.unsafe_until <= now else 0
                self._evict(victim, "copy" if victim.copy else "room", now)
        return offset

    def _evict(self, entry: Entry, reason: str, now: float) -> None:
        """Take a chunk that is ready out of sight; its memory is free once nobody reads it."""
        key = entry.chunk.key
        del self._index[key]
        self._victims.remove(entry)
        entry.state = _EVICTING
        self._evicting[entry.generation] = entry
        self.stats.num_evicted[reason] = self.stats.num_evicted.get(reason, 0) + 1
        self.observer.removed(Tier.DRAM, [key])
        self._free_if_unread(entry, now)

    def _give_up_write(self, entry: Entry) -> None:
        """A chunk won't come: another writer may begin it anew. Idempotent."""
        if self._index.get(entry.chunk.key) is not entry:
            return
        del self._index[entry.chunk.key]
        self.observer.unstaged(entry.chunk.key)
        self.stats.num_aborts += 1
        self._leave_parent(entry)

    def _leave_parent(self, entry: Entry) -> None:
        if entry.parent is not None:
            entry.parent.num_staging_children -= 1
            entry.parent = None

    def _free_if_unread(self, entry: Entry, now: float) -> None:
        if entry.state is _EVICTING and not entry.num_pins:
            del self._evicting[entry.generation]
            self._free(entry, now)

    def _free_unwritten(self, entry: Entry, now: float) -> None:
        """Nothing is written to it any more, and it won't be stored; it may have readers."""
        entry.state = _EVICTING
        self._evicting[entry.generation] = entry
        self._free_if_unread(entry, now)

    def _free(self, entry: Entry, now: float) -> None:
        """Give memory back, at once or after its quarantine."""
        self._used_bytes[entry.group] -= rounded_up(entry.chunk.nbytes)
        if entry.unsafe_until > now:
            heapq.heappush(self._quarantine, (entry.unsafe_until, entry.offset))
        else:
            self._allocator.free(entry.offset)


def _bounded(lease_s: float) -> float:
    """A lease that somebody asked for, who may have asked for NaN."""
    return max(0.0, min(MAX_LEASE_S, lease_s))
