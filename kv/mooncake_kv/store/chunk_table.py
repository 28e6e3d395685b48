"""The chunks in a store's arena, with their read and write handles: ``ChunkTable``, used by
``NodeStore``. Pure: the clock is an argument, and the arena's bytes are never accessed.

    STAGING --commit--> READY --evicted or dropped--> EVICTING --last reader ended--> free
       \\--abort, or its writer has exited---------------------------------------/

Reads and writes of the arena are one-sided: the store can't stop them. So it reuses a chunk's
memory only when

* all of its readers have released it, or are past their deadlines by the user's quarantine. What
  such a late reader has read is not valid, and ``release`` returns False;
* and its writer has ended the write. If a transfer of it has failed, its data may still be on the
  way, and the memory is quarantined, as it is once a writer is known to be dead. A writer past its
  deadline, or without a session, can't commit any more, but keeps its memory, in state ABANDONED: a
  late byte would silently corrupt another chunk. A writer without a session is not necessarily
  dead: it may be frozen in the middle of a copy, and resume at any time. ``end_user`` is called
  once its processes are known to have exited; see ``store_service``.

The quarantine covers bytes that were sent and have not arrived; it is longer for users whose
transfers may take longer.

Users pass batches, all chunks of a prompt at once. Each method iterates over its batch once, and
where possible creates one lease, allocates one range of memory and notifies the observer once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mooncake_kv.store.arena_allocator import ArenaAllocator, rounded_up
from mooncake_kv.store.chunk_handles import SSD_USER, ChunkHandles, ChunkState, Entry, Lease
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

MAX_EVICTED_SIZES = 4
"""Upper bound of the memory evicted for one chunk, in multiples of its size: freed ranges may be
too fragmented to hold it."""
QUARANTINE_MARGIN_S = 10.0
"""Seconds that a quarantine exceeds the user's transfer timeout: the timeout starts only when a
rank has received the order, and copies check it only between pieces."""

_ENDS_A_SEQUENCE = {
    PutRefusal.NO_SPACE,
    PutRefusal.OVER_QUOTA,
    PutRefusal.TOO_LARGE,
    PutRefusal.LOW_VALUE,
}

_STAGING, _READY, _EVICTING, _ABANDONED = ChunkState
"""Module-level names, because an attribute lookup on an Enum takes 0.2 us, once per chunk of a
batch."""


@dataclass(frozen=True, slots=True)
class TableSettings:
    """Settings of a ``ChunkTable``.

    Args:
        make_policy: creates an eviction policy; called once per tenant with a quota, and for the
            groups of all others.
        quarantine_s: seconds before memory is reused after a reader missed its deadline, a write
            failed or a writer died; more for some users, see ``set_transfer_timeout``.
        quotas: bytes by tenant. Other tenants share the rest, without a limit of their own.
    """

    make_policy: Callable[[], EvictionPolicy]
    quarantine_s: float = 30.0
    quotas: Mapping[str, int] = field(default_factory=dict)


class TableObserver(StoreObserver, Protocol):
    """A ``StoreObserver`` that is notified of writes in progress, too."""

    def staging(self, keys: Sequence[bytes]) -> None:
        """Memory was reserved for chunks; ``committed`` or ``unstaged`` follows for each."""
        ...

    def unstaged(self, key: bytes) -> None:
        """The write of a chunk was aborted or expired; it is not stored."""
        ...

    def committed(self, chunks: Sequence[Chunk]) -> None:
        """These chunks are in memory now. Replaces ``stored``, which is not called for them."""
        ...


class NoObserver:
    """An observer that ignores all notifications."""

    def staging(self, keys: Sequence[bytes]) -> None:
        """Ignored."""

    def unstaged(self, key: bytes) -> None:
        """Ignored."""

    def committed(self, chunks: Sequence[Chunk]) -> None:
        """Ignored."""

    def stored(self, tier: Tier, chunks: Sequence[Chunk]) -> None:
        """Ignored."""

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Ignored."""


class ChunkTable:
    """The chunks of one arena. Not thread-safe: the owner, ``NodeStore``, holds its lock.

    Args:
        capacity: size of the arena in bytes.
        settings: eviction policy, quarantine and quotas.
        observer: notified of what memory holds and what is being written there.
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
        self._quarantine_s: dict[int, float] = {}  # by user with a transfer timeout
        self._last_generation = 0

    # -- reading --------------------------------------------------------------------------------

    def probe(self, keys: Sequence[bytes]) -> list[Residence]:
        """Look chunks up; does not count as a use."""
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
        """Grant reads of chunks that are READY; does not count as a use, see ``touch``.

        Args:
            keys: the chunks to read.
            user: the user that gets the handles.
            lease_s: seconds until the handles expire.
            now: the time.
            are_arriving: grant reads of chunks in STAGING instead. Such a read is valid if the
                write is committed before the read is released.
        """
        self.expire(now)
        lease_s, index = _clamped(lease_s), self._index
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
        self.stats.pinned_bytes += pinned_bytes if user != SSD_USER else 0
        return handles

    def release(self, handle_ids: Sequence[int], user: int, now: float) -> list[bool]:
        """End reads; returns whether each handle was in force until now."""
        self.expire(now)
        valid = []
        for entry in self._handles.take(handle_ids, user, is_write=False):
            if entry is not None:
                entry.num_pins -= 1
                if entry.state is _READY:
                    valid.append(True)
                    if not entry.num_pins:
                        self._victims.unused(entry)
                    continue
                self._free_if_unread(entry, now)
            valid.append(False)
        self.stats.num_invalid_reads += valid.count(False)
        return valid

    def extend(self, handle_ids: Sequence[int], user: int, lease_s: float, now: float) -> None:
        """Renew a user's reads that are in force: they expire ``lease_s`` from now."""
        self._handles.extend(handle_ids, user, now + _clamped(lease_s))

    def is_held(self, handle_id: int, user: int, now: float) -> bool:
        """Whether a handle is in force, which means that its memory has held the chunk since."""
        return self._handles.is_held(handle_id, user, now)

    def touch(self, keys: Sequence[bytes], now: float) -> None:
        """Count a use of each chunk of a sequence; keys that are not in memory are skipped."""
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
        """Allocate memory for each chunk of a sequence, or return the reason why not.

        Chunks that are present are touched if ``is_use``. If not, the new chunks start with no use,
        so that the next use is their first. If the allocation fails for one chunk, the chunks after
        it are refused too: they could not be used without it.
        """
        self.expire(now)
        if is_use:
            self.touch([chunk.key for chunk in chunks], now)
        missing: dict[bytes, int] = {}
        for chunk in chunks:  # a key that occurs twice is staged once
            if chunk.key not in self._index:
                missing.setdefault(chunk.key, chunk.nbytes)
        self._uses.note(missing, now, PUT_USES if copy is None else 1.0)
        lease_s, num_left = _clamped(lease_s), self._handles.num_left(user)
        self._victims.begin(len(chunks))
        offsets = self._allocate_together(list(missing.values())[:num_left])
        found: list[Entry | PutRefusal] = []
        staged: list[Entry] = []
        ending = None
        for chunk in chunks:
            if ending is None and len(staged) == num_left:
                ending = PutRefusal.NO_SPACE
            outcome = ending or self._stage(chunk, offsets, now, copy)
            found.append(outcome)
            if isinstance(outcome, Entry):
                outcome.num_uses = int(is_use)
                staged.append(outcome)
            else:
                self._count_refusal(outcome, user)
                ending = outcome if outcome in _ENDS_A_SEQUENCE else None
        numbers = iter(self._handles.grant(staged, user, now + lease_s, is_write=True))
        self.observer.staging([entry.chunk.key for entry in staged])
        return [
            WriteHandle(next(numbers), o.chunk.key, o.offset, o.chunk.nbytes, o.generation, lease_s)
            if isinstance(o, Entry)
            else o
            for o in found
        ]

    def _count_refusal(self, reason: PutRefusal, user: int) -> None:
        stats = self.stats
        refused = stats.num_refused_loads if user == SSD_USER else stats.num_refused_puts
        refused[reason.value] = refused.get(reason.value, 0) + 1

    def commit(self, handle_ids: Sequence[int], user: int, now: float) -> list[bool]:
        """Make complete writes readable. False: the handle has expired, or is unknown."""
        entries = self._end_writes(handle_ids, user, now, now)
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

    def abort(
        self, handle_ids: Sequence[int], user: int, now: float, *, may_still_arrive: bool = False
    ) -> list[bool]:
        """End incomplete writes. Their memory is free at once, or quarantined if data of them
        ``may_still_arrive``."""
        unsafe_until = now + self._quarantine_of(user) if may_still_arrive else now
        entries = self._end_writes(handle_ids, user, now, unsafe_until)
        for entry in entries:
            if entry is not None:
                self._give_up_write(entry)
                self._free_unwritten(entry, now, unsafe_until)
        return [entry is not None for entry in entries]

    # -- leaving --------------------------------------------------------------------------------

    def drop(self, keys: Sequence[bytes], now: float) -> int:
        """Remove chunks, even while they are read; returns how many were present."""
        found = [self._index.get(key) for key in dict.fromkeys(keys)]
        ready = [e for e in found if e is not None and e.state is _READY]
        for entry in ready:
            self._evict(entry, "drop", now)
        return len(ready)

    def set_transfer_timeout(self, user: int, timeout_s: float) -> None:
        """Set the upper bound of a user's transfers, which its quarantine must exceed."""
        needed_s = timeout_s + QUARANTINE_MARGIN_S
        self._quarantine_s[user] = max(needed_s, self._settings.quarantine_s)

    def abandon_user(self, user: int, now: float) -> bool:
        """Handle the loss of a user's session: its reads end, and its unfinished writes become
        ABANDONED and keep their memory. Returns whether there are any; if so, ``end_user`` or
        ``abort`` must follow."""
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
        """An abandoned user has a new session: abort its writes, except the handles in ``writing``,
        whose transfers are still in flight. Some of the others may have failed."""
        ended = self._handles.of_user(user, is_write=True).keys() - set(writing)
        self.abort(list(ended), user, now, may_still_arrive=True)

    def end_user(self, user: int, now: float, *, is_drained: bool) -> None:
        """End a user that starts no more transfers. The memory of its unfinished writes is
        quarantined, and that of its reads unless it ``is_drained``: has none in flight either."""
        self.expire(now)
        unsafe_until = now + self._quarantine_of(user)
        for entry, is_write in self._handles.end_user(user):
            if is_write:
                self._give_up_write(entry)
                self._free_unwritten(entry, now, unsafe_until)
            else:
                self._end_read(entry, now if is_drained else unsafe_until, now)
        self._quarantine_s.pop(user, None)

    def expire(self, now: float) -> None:
        """End handles whose deadlines have passed, and free memory whose quarantine is over."""
        for lease in self._handles.expired(now):
            if lease.is_write:
                self._abandon(lease)
            else:
                self._end_late_reads(lease, now)
        while self._quarantine and self._quarantine[0][0] <= now:
            self._allocator.free(heapq.heappop(self._quarantine)[1])

    # -- looking --------------------------------------------------------------------------------

    def entry(self, key: bytes) -> Entry | None:
        """The entry of a chunk that is in memory and readable."""
        entry = self._index.get(key)
        return entry if entry is not None and entry.state is _READY else None

    def has_readers(self, key: bytes) -> bool:
        """Whether a chunk in memory, READY or STAGING, has read handles."""
        entry = self._index.get(key)
        return entry is not None and entry.num_pins > 0

    def ready_chunks(self) -> Iterator[Chunk]:
        """All readable chunks, in no particular order."""
        return (e.chunk for e in self._index.values() if e.state is _READY)

    def fill_levels(self, stats: StoreStats) -> None:
        """Set the gauges of ``stats`` to their current values."""
        stats.capacity_bytes = self._allocator.capacity
        stats.free_bytes = self._allocator.free_bytes
        stats.tenant_quota_bytes = dict(self._settings.quotas)
        stats.tenant_bytes = {tenant: self._used_bytes[tenant] for tenant in self._settings.quotas}
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
        """Check that no byte is leaked or owned twice, and that handles and chunks agree.

        Raises:
            AssertionError: an invariant is violated.
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
        """Expire writes: their chunks won't be stored, but keep their memory as ABANDONED."""
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
        """End a read that was not released; its reader may still access the memory until then."""
        entry.unsafe_until = max(entry.unsafe_until, unsafe_until)
        entry.num_pins -= 1
        self._victims.unused(entry)
        self._free_if_unread(entry, now)

    def _quarantine_of(self, user: int) -> float:
        return self._quarantine_s.get(user, self._settings.quarantine_s)

    def _end_writes(
        self, handle_ids: Sequence[int], user: int, now: float, unsafe_until: float
    ) -> list[Entry | None]:
        """Take write handles: the entry of each that was in force until now, else None. The memory
        of writes that had expired is freed, at ``unsafe_until``."""
        self.expire(now)
        entries = self._handles.take(handle_ids, user, is_write=True)
        for position, entry in enumerate(entries):
            if entry is not None and entry.state is _ABANDONED:
                self._free_unwritten(entry, now, unsafe_until)
                entries[position] = None
        return entries

    def _allocate_together(self, sizes: Sequence[int]) -> Iterator[int]:
        """Allocate as many chunks of a batch as fit without an eviction; yields their offsets."""
        if self._settings.quotas or len(set(sizes)) != 1:
            return iter(())
        return iter(self._allocator.allocate_many(sizes[0], len(sizes)))

    def _stage(
        self, chunk: Chunk, offsets: Iterator[int], now: float, copy: CopyTerms | None
    ) -> Entry | PutRefusal:
        """Create the entry of a chunk that is missing, at the next of ``offsets``, or else in
        memory that is freed for it."""
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
        """Allocate memory for a chunk, evicting others as needed."""
        nbytes = rounded_up(chunk.nbytes)
        if nbytes > self._allocator.capacity:
            return PutRefusal.TOO_LARGE
        quota = self._settings.quotas.get(group)
        if quota is not None and nbytes > quota:
            return PutRefusal.OVER_QUOTA
        while quota is not None and self._used_bytes[group] + nbytes > quota:
            victim = self._victims.first(group, chunk.parent, now)
            if victim is None:
                return PutRefusal.OVER_QUOTA
            if copy is not None and not self._victims.is_worth(chunk, copy, [victim], now):
                return PutRefusal.LOW_VALUE
            self._evict(victim, "quota", now)
        freed = 0
        while (offset := self._allocator.allocate(nbytes)) is None:
            victims = (
                self._victims.victims_for(chunk, now) if freed < MAX_EVICTED_SIZES * nbytes else []
            )
            if not victims:
                return PutRefusal.NO_SPACE
            if copy is not None and not self._victims.is_worth(chunk, copy, victims, now):
                return PutRefusal.LOW_VALUE
            for victim in victims:
                freed += rounded_up(victim.chunk.nbytes)
                self._evict(victim, "copy" if victim.copy else "room", now)
        return offset

    def _evict(self, entry: Entry, reason: str, now: float) -> None:
        """Remove a READY chunk from the index; its memory is freed when its last read ends."""
        key = entry.chunk.key
        del self._index[key]
        self._victims.remove(entry)
        entry.state = _EVICTING
        self._evicting[entry.generation] = entry
        self.stats.num_evicted[reason] = self.stats.num_evicted.get(reason, 0) + 1
        self.observer.removed(Tier.DRAM, [key])
        self._free_if_unread(entry, now)

    def _give_up_write(self, entry: Entry) -> None:
        """Remove the chunk of an ended write from the index, so that another writer may reserve it.
        Idempotent."""
        if self._index.get(entry.chunk.key) is not entry:
            return
        del self._index[entry.chunk.key]
        self.observer.unstaged(entry.chunk.key)
        self.stats.num_aborts += 1
        self._leave_parent(entry)

    def _leave_parent(self, entry: Entry) -> None:
        if entry.parent is not None:
            entry.parent.num_staging_children -= 1
            self._victims.unused(entry.parent)
            entry.parent = None

    def _free_if_unread(self, entry: Entry, now: float) -> None:
        if entry.state is _EVICTING and not entry.num_pins:
            del self._evicting[entry.generation]
            self._free(entry, now)

    def _free_unwritten(self, entry: Entry, now: float, unsafe_until: float) -> None:
        """Free the memory of an aborted write at ``unsafe_until``, once it has no readers."""
        entry.state = _EVICTING
        entry.unsafe_until = max(entry.unsafe_until, unsafe_until)
        self._evicting[entry.generation] = entry
        self._free_if_unread(entry, now)

    def _free(self, entry: Entry, now: float) -> None:
        """Free a chunk's memory, at once or after its quarantine."""
        self._used_bytes[entry.group] -= rounded_up(entry.chunk.nbytes)
        if entry.unsafe_until > now:
            heapq.heappush(self._quarantine, (entry.unsafe_until, entry.offset))
        else:
            self._allocator.free(entry.offset)


def _clamped(lease_s: float) -> float:
    """Clamp a requested lease to 0 .. MAX_LEASE_S; a NaN from a client becomes MAX_LEASE_S."""
    return max(0.0, min(MAX_LEASE_S, lease_s))
