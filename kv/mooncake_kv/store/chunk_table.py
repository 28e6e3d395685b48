"""What is in a store's memory, who may read or write it, and until when. Pure: the clock is an
argument, and no byte is touched.

    STAGING --commit--> READY --evicted or dropped--> EVICTING --last reader ended--> free
       \\--abort, or its writer is gone------------------------------------------/

Readers and writers are one-sided: nothing here can stop them. So memory is used again only when

* all its readers ended, or their deadlines are past by ``quarantine_s``; what such a reader has
  read is not valid, and ``release`` says so;
* its writer said that nothing of it moves any more, or is known to be gone for ``quarantine_s``. A
  writer past its deadline can't commit any more, but its memory stays with it: a late byte would
  land in somebody else's chunk, and nobody would notice.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import msgspec

from mooncake_kv.store.arena_allocator import ArenaAllocator, rounded_up
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
from mooncake_kv.store.copy_worth import PUT_USES, UseCounts, loss_of_last, worth_of_copy
from mooncake_kv.store.eviction import EvictionPolicy

MAX_HANDLES_PER_USER = 65_536
MAX_SKIPPED_VICTIMS = 4096
"""How many chunks that can't go an eviction looks past, before the store counts as full."""

_ENDS_A_SEQUENCE = {
    PutRefusal.NO_ROOM,
    PutRefusal.OVER_QUOTA,
    PutRefusal.TOO_LARGE,
    PutRefusal.NOT_WORTH_IT,
}

SHARED = ""
"""The group of all tenants that have no quota."""
COPIES = "\0copies"
"""The group of what they have fetched from other stores."""


class ChunkState(Enum):
    """Where a chunk in memory stands."""

    STAGING = auto()
    READY = auto()
    EVICTING = auto()
    """Not to be found any more; its memory waits for those who read it."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """A chunk in memory.

    Args:
        chunk: what it is.
        offset: where it begins in the arena.
        generation: how many chunks were reserved before it.
        state: see there.
        used_at: when it was last put, pinned or touched.
        num_uses: how often.
        num_pins: read handles in force.
        group: whose policy and quota it is under.
        copy: the terms it was copied on; None if no other store is known to have it.
        num_staging_children: chunks that follow it and are being written; it stays for them.
        parent: while it is being written, the chunk before it.
        unsafe_until: until then a reader that never said that it ended may still read.
    """

    chunk: Chunk
    offset: int
    generation: int
    state: ChunkState
    used_at: float
    group: str = SHARED
    copy: CopyTerms | None = None
    num_uses: int = 1
    num_pins: int = 0
    num_staging_children: int = 0
    parent: Entry | None = None
    unsafe_until: float = 0.0


class _Lease(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A handle in force: whose, of what, until when."""

    entry: Entry
    user: int
    deadline: float
    is_write: bool


@dataclass(frozen=True, slots=True)
class TableSettings:
    """How a table behaves.

    Args:
        make_policy: a new eviction policy; one per tenant with a quota, and one for all others.
        quarantine_s: how long memory rests after a reader or writer went silent; at least the
            longest timeout of a transfer.
        quotas: bytes by tenant. A tenant that is not named here has no limit of its own.
    """

    make_policy: Callable[[], EvictionPolicy]
    quarantine_s: float = 30.0
    quotas: Mapping[str, int] = field(default_factory=dict)


class TableObserver(StoreObserver, Protocol):
    """Follows a table more closely than a store's users may."""

    def staging(self, key: bytes, is_staging: bool) -> None:
        """A chunk is being written to memory, or no longer; ``stored`` there ends it, too."""
        ...


class NoObserver:
    """Follows nothing."""

    def staging(self, key: bytes, is_staging: bool) -> None:
        """Nobody follows."""

    def stored(self, tier: Tier, chunk: Chunk) -> None:
        """Nobody follows."""

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """Nobody follows."""

    def cleared(self, tier: Tier) -> None:
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
        self._policies = {group: settings.make_policy() for group in (SHARED, COPIES)}
        self._policies |= {tenant: settings.make_policy() for tenant in settings.quotas}
        self._used_bytes = dict.fromkeys(self._policies, 0)
        self._index: dict[bytes, Entry] = {}
        self._evicting: dict[int, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._abandoned: dict[int, _Lease] = {}  # of writers past their deadline
        self._users: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._quarantine: list[tuple[float, int]] = []
        # not the ids of another epoch of this store: what was granted there is nothing here
        self._last_handle = secrets.randbits(48) << 14
        self._last_generation = 0

    # -- reading --------------------------------------------------------------------------------

    def probe(self, keys: Sequence[bytes]) -> list[Residence]:
        """What is there; changes nothing."""
        found = [self._index.get(key) for key in keys]
        return [
            Residence.ABSENT
            if entry is None
            else (Residence.DRAM if entry.state is ChunkState.READY else Residence.STAGING)
            for entry in found
        ]

    def pin(
        self, keys: Sequence[bytes], user: int, lease_s: float, now: float
    ) -> list[ReadHandle | None]:
        """Grant reads of those that are ready; does not count as use, see ``touch``."""
        self.expire(now)
        lease_s = _bounded(lease_s)
        return [self._pin(self._index.get(key), user, lease_s, now) for key in keys]

    def release(self, handle_ids: Sequence[int], user: int, now: float) -> list[bool]:
        """End reads; whether each was in force until now."""
        self.expire(now)
        valid = []
        for handle_id in handle_ids:
            lease = self._take_lease(handle_id, user, is_write=False)
            if lease is not None:
                lease.entry.num_pins -= 1
                self._free_if_unread(lease.entry, now)
            in_force = lease is not None and lease.entry.state is ChunkState.READY
            self.stats.num_invalid_reads += not in_force
            valid.append(in_force)
        return valid

    def extend(self, handle_ids: Sequence[int], lease_s: float, now: float) -> None:
        """Have reads that are in force last ``lease_s`` from now."""
        lease_s = _bounded(lease_s)
        for handle_id in handle_ids:
            lease = self._leases.get(handle_id)
            if lease is not None and not lease.is_write:
                self._leases[handle_id] = _Lease(lease.entry, lease.user, now + lease_s, False)
                heapq.heappush(self._deadlines, (now + lease_s, handle_id))

    def is_held(self, handle_id: int, now: float) -> bool:
        """Whether a handle is in force, so that its memory has been the chunk's until now."""
        lease = self._leases.get(handle_id)
        return lease is not None and lease.deadline > now

    def touch(self, keys: Sequence[bytes], now: float) -> None:
        """Count a use of a sequence; keys that aren't there are passed over."""
        groups: dict[str, list[bytes]] = {}
        for key in keys:
            entry = self._index.get(key)
            if entry is not None and entry.state is ChunkState.READY:
                entry.used_at = now
                entry.num_uses += 1
                self._uses.note(key, now)
                groups.setdefault(entry.group, []).append(key)
        for group, members in groups.items():
            self._policies[group].touch(members)

    # -- writing --------------------------------------------------------------------------------

    def reserve(
        self,
        chunks: Sequence[Chunk],
        user: int,
        lease_s: float,
        now: float,
        copy: CopyTerms | None = None,
    ) -> list[WriteHandle | PutRefusal]:
        """Memory for each of a sequence's chunks, or why not. Those that are there are touched.

        Where one finds no memory, those behind it get none: they would be of no use without it.
        """
        self.expire(now)
        self.touch([chunk.key for chunk in chunks], now)
        granted: list[WriteHandle | PutRefusal] = []
        ending = None
        for chunk in chunks:
            grant = ending or self._reserve(chunk, user, _bounded(lease_s), now, copy)
            granted.append(grant)
            if isinstance(grant, PutRefusal):
                refused = self.stats.num_refused_puts
                refused[grant.value] = refused.get(grant.value, 0) + 1
                ending = grant if grant in _ENDS_A_SEQUENCE else None
        return granted

    def commit(self, handle_ids: Sequence[int], user: int, now: float) -> list[bool]:
        """Writes that are complete become readable. False: too late, or unknown."""
        self.expire(now)
        return [self._end_write(handle_id, user, True, now) for handle_id in handle_ids]

    def abort(self, handle_ids: Sequence[int], user: int, now: float) -> list[bool]:
        """Writes that ended incomplete; their memory is free at once."""
        self.expire(now)
        return [self._end_write(handle_id, user, False, now) for handle_id in handle_ids]

    # -- leaving --------------------------------------------------------------------------------

    def drop(self, keys: Sequence[bytes], now: float) -> int:
        """Forget chunks, whoever reads them; returns how many were there."""
        found = [self._index.get(key) for key in keys]
        ready = [e for e in found if e is not None and e.state is ChunkState.READY]
        for entry in ready:
            self._evict(entry, "drop", now)
        return len(ready)

    def end_user(self, user: int, now: float, *, is_drained: bool) -> None:
        """A user is gone, and starts nothing any more.

        Args:
            user: which.
            is_drained: nothing that it began moves either.
            now: the time.
        """
        self.expire(now)
        until = now if is_drained else now + self._settings.quarantine_s
        for handle_id in list(self._users.pop(user, ())):
            lease = self._leases.pop(handle_id, None) or self._abandoned.pop(handle_id)
            lease.entry.unsafe_until = max(lease.entry.unsafe_until, until)
            if lease.is_write:
                self._give_up_write(lease.entry)
                self._free(lease.entry, now)
            else:
                lease.entry.num_pins -= 1
                self._free_if_unread(lease.entry, now)

    def expire(self, now: float) -> None:
        """End the handles whose deadlines have passed, and the quarantine of what rested."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, handle_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(handle_id)
            if lease is None or lease.deadline > now:
                continue
            del self._leases[handle_id]
            if lease.is_write:
                self.stats.num_expired_writes += 1
                self._abandoned[handle_id] = lease
                self._give_up_write(lease.entry)
                continue
            self.stats.num_expired_reads += 1
            self._forget_handle(lease.user, handle_id)
            silent_until = lease.deadline + self._settings.quarantine_s
            lease.entry.unsafe_until = max(lease.entry.unsafe_until, silent_until)
            lease.entry.num_pins -= 1
            self._free_if_unread(lease.entry, now)
        while self._quarantine and self._quarantine[0][0] <= now:
            self._allocator.free(heapq.heappop(self._quarantine)[1])

    # -- looking --------------------------------------------------------------------------------

    def entry(self, key: bytes) -> Entry | None:
        """A chunk that is in memory and readable."""
        entry = self._index.get(key)
        return entry if entry is not None and entry.state is ChunkState.READY else None

    def ready_chunks(self) -> Iterator[Chunk]:
        """All that can be found, in no order."""
        return (e.chunk for e in self._index.values() if e.state is ChunkState.READY)

    def fill_levels(self, stats: StoreStats) -> None:
        """Set the levels of ``stats`` to what there is now."""
        stats.capacity_bytes = self._allocator.capacity
        stats.free_bytes = self._allocator.free_bytes
        resting = (self._allocator.allocated_bytes(offset) for _, offset in self._quarantine)
        stats.quarantine_bytes = sum(resting)
        given_up = [rounded_up(e.entry.chunk.nbytes) for e in self._abandoned.values()]
        stats.abandoned_bytes = sum(given_up)
        num_staging = sum(lease.is_write for lease in self._leases.values())
        stats.num_chunks = len(self._index) - num_staging
        stats.num_staging = num_staging
        stats.num_pins = len(self._leases) - num_staging

    def check_integrity(self) -> None:
        """Prove that no byte is lost or owned twice, and that handles and chunks agree.

        Raises:
            AssertionError: they don't.
        """
        self._allocator.check_integrity()
        owners = [e.offset for e in (*self._index.values(), *self._evicting.values())]
        owners += [offset for _, offset in self._quarantine]
        owners += [lease.entry.offset for lease in self._abandoned.values()]
        assert len(set(owners)) == len(owners), "a range of memory is owned twice"
        owned_bytes = sum(self._allocator.allocated_bytes(offset) for offset in owners)
        total = owned_bytes + self._allocator.free_bytes
        assert total == self._allocator.capacity, "free bytes don't conserve"
        pins = dict.fromkeys(
            (e.generation for e in (*self._index.values(), *self._evicting.values())), 0
        )
        for lease in self._leases.values():
            if lease.is_write:
                assert self._index[lease.entry.chunk.key] is lease.entry, "a write lost its chunk"
            else:
                pins[lease.entry.generation] += 1
        for entry in (*self._index.values(), *self._evicting.values()):
            assert entry.num_pins == pins[entry.generation], "pins and handles disagree"
        ids = {i for members in self._users.values() for i in members}
        assert ids == {*self._leases, *self._abandoned}, "a handle has no user"
        used = dict.fromkeys(self._policies, 0)
        held = [*self._index.values(), *self._evicting.values()]
        for entry in [*held, *(lease.entry for lease in self._abandoned.values())]:
            used[entry.group] += rounded_up(entry.chunk.nbytes)
        assert used == self._used_bytes, "a tenant's bytes are miscounted"

    # -- inside ---------------------------------------------------------------------------------

    def _group(self, chunk: Chunk, copy: CopyTerms | None) -> str:
        if chunk.tenant in self._settings.quotas:
            return chunk.tenant
        return SHARED if copy is None else COPIES

    def _lease(
        self, entry: Entry, user: int, lease_s: float, now: float, *, is_write: bool
    ) -> int | None:
        handles = self._users.setdefault(user, set())
        if len(handles) >= MAX_HANDLES_PER_USER:
            return None
        self._last_handle += 1
        deadline = now + lease_s
        self._leases[self._last_handle] = _Lease(entry, user, deadline, is_write)
        heapq.heappush(self._deadlines, (deadline, self._last_handle))
        handles.add(self._last_handle)
        return self._last_handle

    def _take_lease(self, handle_id: int, user: int, *, is_write: bool) -> _Lease | None:
        lease = self._leases.get(handle_id)
        if lease is None or lease.user != user or lease.is_write is not is_write:
            return None
        del self._leases[handle_id]
        self._forget_handle(user, handle_id)
        return lease

    def _forget_handle(self, user: int, handle_id: int) -> None:
        handles = self._users.get(user)
        if handles is not None:
            handles.discard(handle_id)
            if not handles:
                del self._users[user]

    def _pin(self, entry: Entry | None, user: int, lease_s: float, now: float) -> ReadHandle | None:
        if entry is None or entry.state is not ChunkState.READY:
            return None
        handle_id = self._lease(entry, user, lease_s, now, is_write=False)
        if handle_id is None:
            return None
        entry.num_pins += 1
        chunk = entry.chunk
        self.stats.pinned_bytes += chunk.nbytes if user else 0
        return ReadHandle(
            handle_id, chunk.key, entry.offset, chunk.nbytes, entry.generation, lease_s
        )

    def _reserve(
        self, chunk: Chunk, user: int, lease_s: float, now: float, copy: CopyTerms | None
    ) -> WriteHandle | PutRefusal:
        present = self._index.get(chunk.key)
        if present is not None:
            is_ready = present.state is ChunkState.READY
            return PutRefusal.PRESENT if is_ready else PutRefusal.STAGING
        self._uses.note(chunk.key, now, PUT_USES if copy is None else 1.0)
        found = self._find_memory(chunk, now, copy)
        if isinstance(found, PutRefusal):
            return found
        self._last_generation += 1
        group, generation = self._group(chunk, copy), self._last_generation
        entry = Entry(chunk, found, generation, ChunkState.STAGING, now, group, copy)
        handle_id = self._lease(entry, user, lease_s, now, is_write=True)
        if handle_id is None:
            self._allocator.free(found)
            return PutRefusal.NO_ROOM
        self._index[chunk.key] = entry
        self.observer.staging(chunk.key, True)
        self._used_bytes[group] += rounded_up(chunk.nbytes)
        if chunk.parent is not None and (parent := self._index.get(chunk.parent)) is not None:
            entry.parent = parent
            parent.num_staging_children += 1
        return WriteHandle(handle_id, chunk.key, found, chunk.nbytes, entry.generation, lease_s)

    def _find_memory(self, chunk: Chunk, now: float, copy: CopyTerms | None) -> int | PutRefusal:
        """Allocate, evicting what has to go for it."""
        nbytes, group = rounded_up(chunk.nbytes), self._group(chunk, copy)
        if nbytes > self._allocator.capacity:
            return PutRefusal.TOO_LARGE
        quota = self._settings.quotas.get(group)
        while quota is not None and self._used_bytes[group] + nbytes > quota:
            victim = self._victim(group, chunk.parent)
            if victim is None:
                return PutRefusal.OVER_QUOTA
            if copy is not None and not self._is_worth(chunk, copy, victim, now):
                return PutRefusal.NOT_WORTH_IT
            self._evict(victim, "quota", now)
        while (offset := self._allocator.allocate(nbytes)) is None:
            victims = [self._victim(group, chunk.parent) for group in self._policies]
            candidates = [victim for victim in victims if victim is not None]
            if not candidates:
                return PutRefusal.NO_ROOM
            victim = self._least_worth(candidates, now)
            if copy is not None and not self._is_worth(chunk, copy, victim, now):
                return PutRefusal.NOT_WORTH_IT
            self._evict(victim, "copy" if victim.copy else "room", now)
        return offset

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

    def _is_worth(self, chunk: Chunk, copy: CopyTerms, victim: Entry, now: float) -> bool:
        worth = worth_of_copy(self._uses.uses(chunk.key, now), copy)
        return worth > self._loss(victim, chunk, copy, now)

    def _loss(self, victim: Entry, chunk: Chunk, terms: CopyTerms, now: float) -> float:
        """Seconds that a victim's loss costs; ``chunk`` and ``terms`` as in ``loss_of_last``."""
        uses = self._uses.uses(victim.chunk.key, now)
        if victim.copy is not None:
            return worth_of_copy(uses, victim.copy)
        return loss_of_last(uses, victim.chunk, chunk, terms)

    def _victim(self, group: str, kept: bytes | None) -> Entry | None:
        """The first chunk in a policy's order that may go.

        One that may not go takes all before it in its sequence along: without those it would be of
        no use.
        """
        blocked = {kept}
        for count, key in enumerate(self._policies[group].victims()):
            entry = self._index[key]
            if key not in blocked and not entry.num_pins and not entry.num_staging_children:
                return entry
            if entry.chunk.parent is not None:
                blocked.add(entry.chunk.parent)
            if count >= MAX_SKIPPED_VICTIMS:
                break
        return None

    def _evict(self, entry: Entry, reason: str, now: float) -> None:
        """Take a chunk that is ready out of sight; its memory is free once nobody reads it."""
        key = entry.chunk.key
        del self._index[key]
        self._policies[entry.group].remove(key)
        entry.state = ChunkState.EVICTING
        self._evicting[entry.generation] = entry
        self.stats.num_evicted[reason] = self.stats.num_evicted.get(reason, 0) + 1
        self.observer.removed(Tier.DRAM, [key])
        self._free_if_unread(entry, now)

    def _end_write(self, handle_id: int, user: int, is_complete: bool, now: float) -> bool:
        late = self._abandoned.get(handle_id)
        if late is not None and late.user == user:
            del self._abandoned[handle_id]
            self._forget_handle(user, handle_id)
            self._free(late.entry, now)
            return False
        lease = self._take_lease(handle_id, user, is_write=True)
        if lease is None:
            return False
        entry = lease.entry
        if not is_complete:
            self._give_up_write(entry)
            self._free(entry, now)
            return True
        entry.state, entry.used_at = ChunkState.READY, now
        self._leave_parent(entry)
        self._policies[entry.group].add(entry.chunk)
        self.stats.num_puts += 1
        self.stats.put_bytes += entry.chunk.nbytes
        self.observer.stored(Tier.DRAM, entry.chunk)
        return True

    def _give_up_write(self, entry: Entry) -> None:
        """A chunk won't come: another writer may begin it anew. Idempotent."""
        if self._index.get(entry.chunk.key) is not entry:
            return
        del self._index[entry.chunk.key]
        self.observer.staging(entry.chunk.key, False)
        self.stats.num_aborts += 1
        self._leave_parent(entry)

    def _leave_parent(self, entry: Entry) -> None:
        if entry.parent is not None:
            entry.parent.num_staging_children -= 1
            entry.parent = None

    def _free_if_unread(self, entry: Entry, now: float) -> None:
        if entry.state is ChunkState.EVICTING and not entry.num_pins:
            del self._evicting[entry.generation]
            self._free(entry, now)

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
