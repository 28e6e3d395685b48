"""The entries of chunks in a store's memory, and users' read and write handles on them. Used by
``ChunkTable``. Pure: the clock is an argument.

Handles that are granted together share one lease, so that most of the Python work is per batch
instead of per chunk.
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
SSD_USER = 0
"""User id of the SSD tier's own handles; users of a store are numbered from 1."""


class ChunkState(Enum):
    """The state of a chunk in memory."""

    STAGING = auto()
    READY = auto()
    EVICTING = auto()
    """Removed from the index; its memory is freed once its last read has ended."""
    ABANDONED = auto()
    """Its writer is past its deadline, or has lost its session. The chunk will not be stored, and
    its memory is not reused before the writer has answered or is known to be dead."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """A chunk in memory.

    Args:
        chunk: the chunk's description.
        offset: where it begins in the arena.
        generation: its number among all chunks that the table has reserved.
        state: its state.
        used_at: when it was last put or touched.
        group: the group whose eviction policy and quota apply.
        copy: the costs of its copies; None if no other store is known to have it.
        num_uses: number of uses.
        num_pins: read handles in force.
        num_staging_children: chunks that follow it and are being written; it is not evicted
            meanwhile.
        parent: the entry of the chunk before it; set while this one is being written.
        unsafe_until: until then, a reader that has not released it may still read its memory, or
            data of a failed write may still arrive there.
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
        user: the user that has them.
        deadline: when they expire.
        is_write: write handles if True, else read handles.
        entries: the entries of those that have not ended, by handle.
    """

    user: int
    deadline: float
    is_write: bool
    entries: dict[int, Entry]


class ChunkHandles:
    """The handles of one table. A write handle is kept past its deadline until its writer has
    answered or ended, because the writer may still write to the memory."""

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Lease]] = {}  # by user, by handle
        self._deadlines: list[tuple[float, int, Lease]] = []  # the number breaks ties
        self._num_leases = 0
        # random start: handles of a former epoch of this store must not be valid here
        self._last_handle = secrets.randbits(48) << 14

    def num_left(self, user: int) -> int:
        """How many more handles a user may be granted."""
        return MAX_HANDLES_PER_USER - len(self._held.get(user, ()))

    def grant(
        self, entries: Sequence[Entry], user: int, deadline: float, *, is_write: bool
    ) -> range:
        """Grant handles on the leading entries, as many as the user's limit allows."""
        count = min(len(entries), self.num_left(user))
        first, self._last_handle = self._last_handle + 1, self._last_handle + count
        handles = range(first, first + count)
        by_handle = dict(zip(handles, entries, strict=False))
        self._add(Lease(user, deadline, is_write, by_handle))
        return handles

    def take(self, handles: Sequence[int], user: int, *, is_write: bool) -> list[Entry | None]:
        """End handles; returns the entry of each, or None if the user has no such handle."""
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
        """Move the deadline of a user's read handles that are in force."""
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
        """Yield each lease whose deadline has passed, once. Expired read handles are ended; expired
        write handles are kept."""
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
        """End all handles of a user; yields the entry of each, and whether it is a write."""
        for handle, lease in self._held.pop(user, {}).items():
            yield lease.entries.pop(handle), lease.is_write

    def of_user(self, user: int, *, is_write: bool) -> dict[int, Entry]:
        """The entries of a user's write handles, or of its read handles, by handle."""
        held = self._held.get(user, {})
        return {h: lease.entries[h] for h, lease in held.items() if lease.is_write is is_write}

    def all(self) -> Iterator[tuple[Entry, bool]]:
        """Yield the entry of each handle, and whether it is a write."""
        for held in self._held.values():
            for handle, lease in held.items():
                yield lease.entries[handle], lease.is_write

    def check_integrity(self) -> None:
        """Check that every handle has a pending deadline or is an abandoned write.

        Raises:
            AssertionError: an invariant is violated.
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
