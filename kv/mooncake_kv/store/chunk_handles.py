"""Chunks in a store's memory, and the handles on them: whose, of what, until when. Pure: the clock
is an argument.

Handles that are granted together share a lease, so that a batch costs a few steps of Python and not
a few per chunk.
"""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from mooncake_kv.store.chunk_store import Chunk, CopyTerms

MAX_HANDLES_PER_USER = 65_536


class ChunkState(Enum):
    """Where a chunk in memory stands."""

    STAGING = auto()
    READY = auto()
    EVICTING = auto()
    """Not to be found any more; its memory waits for those who read it."""
    ABANDONED = auto()
    """Its writer is past its deadline, or has lost its session. It won't come, and its memory waits
    for the writer."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """A chunk in memory.

    Args:
        chunk: what it is.
        offset: where it begins in the arena.
        generation: how many chunks were reserved before it.
        state: see there.
        used_at: when it was last put, pinned or touched.
        group: whose policy and quota it is under.
        copy: the terms it was copied on; None if no other store is known to have it.
        num_uses: how often.
        num_pins: read handles in force.
        num_staging_children: chunks that follow it and are being written; it stays for them.
        parent: while it is being written, the chunk before it.
        unsafe_until: until then a reader that never said that it ended may still read.
    """

    chunk: Chunk
    offset: int
    generation: int
    state: ChunkState
    used_at: float
    group: str
    copy: CopyTerms | None = None
    num_uses: int = 1
    num_pins: int = 0
    num_staging_children: int = 0
    parent: Entry | None = None
    unsafe_until: float = 0.0


@dataclass(slots=True, eq=False)
class Lease:
    """Handles that were granted together.

    Args:
        user: whose.
        deadline: when they end.
        is_write: whether they permit to write.
        entries: of those that have not ended, by handle.
    """

    user: int
    deadline: float
    is_write: bool
    entries: dict[int, Entry]


class ChunkHandles:
    """The handles of one table. A write's handle outlasts its deadline, until its writer speaks or
    is gone: its memory may still be written."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Lease]] = {}  # by user, by handle
        self._deadlines: list[tuple[float, int, Lease]] = []  # the number only tells them apart
        self._num_leases = 0
        # not the ids of another epoch of this store: what was granted there is nothing here
        self._last_handle = secrets.randbits(48) << 14

    def num_left(self, user: int) -> int:
        """How many handles a user may have more."""
        return MAX_HANDLES_PER_USER - len(self._held.get(user, ()))

    def grant(
        self, entries: Sequence[Entry], user: int, deadline: float, *, is_write: bool
    ) -> range:
        """Handles on the leading ones of these, as many as the user may have."""
        count = min(len(entries), self.num_left(user))
        first, self._last_handle = self._last_handle + 1, self._last_handle + count
        handles = range(first, first + count)
        by_handle = dict(zip(handles, entries, strict=False))
        self._add(Lease(user, deadline, is_write, by_handle))
        return handles

    def take(self, handles: Sequence[int], user: int, *, is_write: bool) -> list[Entry | None]:
        """End handles; the entry of each, None where it is none of the user's, or has ended."""
        held = self._held.get(user, {})
        entries: list[Entry | None] = []
        for handle in handles:
            lease = held.get(handle)
            if lease is None or lease.is_write is not is_write:
                entries.append(None)
            else:
                del held[handle]
                entries.append(lease.entries.pop(handle))
        if not held:
            self._held.pop(user, None)
        return entries

    def extend(self, handles: Sequence[int], user: int, deadline: float) -> None:
        """Have a user's reads that are in force last until then."""
        held = self._held.get(user, {})
        entries = {
            handle: lease.entries.pop(handle)
            for handle in handles
            if (lease := held.get(handle)) is not None and not lease.is_write
        }
        self._add(Lease(user, deadline, False, entries))

    def is_held(self, handle: int, user: int, now: float) -> bool:
        """Whether a handle is in force."""
        lease = self._held.get(user, {}).get(handle)
        return lease is not None and lease.deadline > now

    def expired(self, now: float) -> Iterator[Lease]:
        """Leases whose deadline has passed, each once; reads among them have ended."""
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = heapq.heappop(self._deadlines)[2]
            if lease.entries and not lease.is_write:
                held = self._held[lease.user]
                for handle in lease.entries:
                    del held[handle]
                if not held:
                    del self._held[lease.user]
            yield lease

    def end_user(self, user: int) -> Iterator[tuple[Entry, bool]]:
        """End all handles of a user: the entry of each, and whether it was to be written."""
        for handle, lease in self._held.pop(user, {}).items():
            yield lease.entries.pop(handle), lease.is_write

    def of_user(self, user: int, *, is_write: bool) -> dict[int, Entry]:
        """The entries of a user's handles to write, or to read, by handle."""
        held = self._held.get(user, {})
        return {h: lease.entries[h] for h, lease in held.items() if lease.is_write is is_write}

    def all(self) -> Iterator[tuple[Entry, bool]]:
        """The entry of each handle, and whether it is to be written."""
        for held in self._held.values():
            for handle, lease in held.items():
                yield lease.entries[handle], lease.is_write

    def check_integrity(self) -> None:
        """Prove that every handle of a user has a deadline to come, or is a late write.

        Raises:
            AssertionError: one does not.
        """
        to_come = {id(lease) for _, _, lease in self._deadlines}
        for user, held in self._held.items():
            for lease in held.values():
                assert lease.user == user, "a handle is somebody else's"
                states = {entry.state for entry in lease.entries.values()}
                is_late = lease.is_write and states == {ChunkState.ABANDONED}
                assert id(lease) in to_come or is_late, "a handle has no deadline"

    def _add(self, lease: Lease) -> None:
        if lease.entries:
            self._num_leases += 1
            heapq.heappush(self._deadlines, (lease.deadline, self._num_leases, lease))
            held = self._held.setdefault(lease.user, {})
            held.update(dict.fromkeys(lease.entries, lease))
