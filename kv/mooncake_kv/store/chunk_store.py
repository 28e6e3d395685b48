"""What a store offers to whoever wants KV saved or loaded, wherever the store is.

A store holds chunks (see ``chunk_keys``) in an arena of host memory, and may hold more on SSDs.
Messages move names, handles and words; bytes are moved by the caller's ranks, with one-sided reads
and writes of the arena, over whatever transport reaches it:

    put    reserve -> write the arena, by every rank its part -> commit, or abort
    get    pin -> read the arena, by every rank its part -> release: were they the right bytes?

A handle is a permission until its deadline. Nothing that was read counts before ``release`` said
True for it: the handle was in force all the time, so the bytes are the key's. A writer says
``commit`` or ``abort`` only when nothing of it moves any more; a writer that never says either has
its memory set aside until its processes are known to be gone. ``probe`` pins nothing and renews
nothing: what it found may be gone at the next call.

Failure is a miss. A store that is full, slow, dead, restarted or never was there makes futures that
hold ABSENT, None, False or a refusal; they hold no exception.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import msgspec

from mooncake_hal.kv.geometry import KVGeometry
from mooncake_hal.kv.transfer_plan import KVShardSpec
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.store.chunk_layout import stored_layout

DEFAULT_LEASE_S = 10.0
"""How long handles last unless asked otherwise; more than a transfer's timeout."""

MAX_LEASE_S = 120.0

MAX_KEY_BYTES = 64
MAX_TENANT_BYTES = 512
MAX_NAMESPACE_BYTES = 64


class Tier(str, Enum):
    """Where a store holds a chunk."""

    DRAM = "dram"
    SSD = "ssd"


class Residence(str, Enum):
    """What a probe found."""

    ABSENT = "absent"
    STAGING = "staging"
    """Somebody is writing it; a later probe may find it."""
    DRAM = "dram"
    SSD = "ssd"


class PutRefusal(str, Enum):
    """Why a chunk is not to be written."""

    PRESENT = "present"
    """The store has it already: saved as good as if it was written now."""
    STAGING = "staging"
    """Somebody else is writing it."""
    NO_ROOM = "no_room"
    """All memory is pinned, being written or in quarantine."""
    OVER_QUOTA = "over_quota"
    """The tenant's quota is smaller than the chunk, or pinned."""
    TOO_LARGE = "too_large"
    """The chunk is larger than the arena."""
    NOT_WORTH_IT = "not_worth_it"
    """A copy that is worth less than what would have to go for it."""
    UNREACHABLE = "unreachable"
    """The store did not reply."""


class ChunkContent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a chunk is the KV of, for stores that publish KV events.

    Args:
        namespace: whose KV, ``KVIdentity.root`` without a salt: stores hold that of many models.
        token_ids: of the chunk, 4 bytes each, little-endian.
    """

    namespace: bytes
    token_ids: bytes


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """What is put. A Struct, as handles are: a batch makes a thousand of them.

    Args:
        key: its name; KEY_BYTES bytes.
        parent: the key of the chunk before it in its sequence; None for the first.
        position: how many chunks are before it.
        nbytes: ``chunk_layout.chunk_bytes`` of the model.
        num_tokens: tokens per chunk.
        tenant: whose quota it counts against, the ``cache_salt`` of its requests; empty for none.
        content: where the store publishes KV events and the salt is the tenant.

    Raises:
        ValueError: a number or a length that can't be.
    """

    key: bytes
    parent: bytes | None
    position: int
    nbytes: int
    num_tokens: int
    tenant: str = ""
    content: ChunkContent | None = None

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.position < 0 or self.num_tokens < 1:
            raise ValueError(
                f"no chunk has {self.nbytes} bytes, {self.num_tokens} tokens, position "
                f"{self.position}"
            )
        lengths = (len(self.key), len(self.parent or b"-"), len(self.tenant.encode()))
        if not (0 < lengths[0] <= MAX_KEY_BYTES and 0 < lengths[1] <= MAX_KEY_BYTES):
            raise ValueError(f"keys have 1 to {MAX_KEY_BYTES} bytes, not {lengths[:2]}")
        if lengths[2] > MAX_TENANT_BYTES:
            raise ValueError(f"a tenant's name has {lengths[2]} bytes of {MAX_TENANT_BYTES}")
        if self.content is not None and len(self.content.namespace) > MAX_NAMESPACE_BYTES:
            raise ValueError(
                f"a namespace has {len(self.content.namespace)} bytes of {MAX_NAMESPACE_BYTES}"
            )
        if self.content is not None and len(self.content.token_ids) != 4 * self.num_tokens:
            raise ValueError(
                f"{self.num_tokens} tokens have {4 * self.num_tokens} bytes, not "
                f"{len(self.content.token_ids)}"
            )


@dataclass(frozen=True, slots=True)
class CopyTerms:
    """What is known about chunks that other stores hold; see ``copy_worth``.

    Args:
        num_copies: how many stores hold them; 1 or more.
        refetch_s: seconds to fetch one again from there.
        recompute_s: seconds to compute one, with all before it there.

    Raises:
        ValueError: no store holds them, or a time can't be.
    """

    num_copies: int
    refetch_s: float
    recompute_s: float

    def __post_init__(self) -> None:
        is_time = 0 < self.refetch_s < math.inf and 0 < self.recompute_s < math.inf
        if self.num_copies < 1 or not is_time:
            raise ValueError(f"no copy is made on such terms: {self}")


class ReadHandle(msgspec.Struct, frozen=True, gc=False):
    """Permission to read a chunk's bytes.

    Args:
        handle_id: unique within the store's epoch.
        key: of the chunk.
        offset: where it begins in the arena, in bytes; a multiple of GRANULE.
        nbytes: its length.
        generation: of the memory: how many chunks have been put before this one.
        lease_s: seconds that it lasts, from when the store granted it.
        tier: where it was found. One from an SSD lies in the arena by now like all others, unless
            it was pinned with ``first_bytes``.
    """

    handle_id: int
    key: bytes
    offset: int
    nbytes: int
    generation: int
    lease_s: float
    tier: Tier = Tier.DRAM


class WriteHandle(msgspec.Struct, frozen=True, gc=False):
    """Permission to write a chunk's bytes; fields as in ``ReadHandle``."""

    handle_id: int
    key: bytes
    offset: int
    nbytes: int
    generation: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """Where a store's index is; see ``residence_index``.

    Args:
        path: of its file, for processes of the same host and user.
        nbytes: its length.
    """

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """Where a store's memory is.

    Args:
        epoch: of the store; a restarted one has another, and none of the handles.
        address: first byte, in the store's own addresses: the remote side of spans.
        nbytes: its length.
        endpoints: opaque address by transport, for ``Transports.connect``.
        index: what processes of the same host may probe by themselves.
        kv_events: where the store publishes what it holds, a wildcard meaning its host; chunks that
            are put there say what they are the KV of.
    """

    epoch: str
    address: int
    nbytes: int
    endpoints: Mapping[str, bytes] = field(default_factory=dict)
    index: IndexInfo | None = None
    kv_events: KVEventEndpoints | None = None

    def layout(self, geometry: KVGeometry, chunk_tokens: int) -> KVShardSpec:
        """The arena as a rank to plan against; see ``chunk_layout.plan_chunks``."""
        return stored_layout(geometry, chunk_tokens, self.address, self.nbytes)


@dataclass(slots=True)
class StoreStats:
    """Counters since the store's start, and levels where it says so.

    Args:
        capacity_bytes, free_bytes: of the arena (levels).
        quarantine_bytes: freed, but a silent reader or writer may touch it yet (level).
        abandoned_bytes: held by writers past their deadline, or without a session, that have not
            spoken (level).
        num_chunks, num_staging, num_pins: what there is now (levels).
        num_probes: keys that were probed; ``num_found`` those that were there.
        num_dram_hits, num_ssd_hits, num_misses: keys that were pinned, or not.
        pinned_bytes: of all that was pinned.
        num_puts, put_bytes: chunks that were committed.
        num_aborts: writes that were given up, or not in time.
        num_refused_puts: by reason.
        num_evicted: chunks that left memory, by reason: ``room``, ``copy`` (of what
            others hold, for room), ``quota``, ``drop``.
        num_expired_reads, num_expired_writes: handles whose deadline passed: leaks of clients.
        num_invalid_reads: releases that said False.
        ssd_chunks, ssd_bytes, ssd_capacity_bytes: what SSDs hold (levels).
        ssd_written_bytes, ssd_read_bytes: record bytes that went there and came back.
        num_ssd_corrupt: records that failed their checksum, which were then forgotten.
        num_ssd_errors: reads and writes that the system refused, and segments whose headers it did
            not read at start.
        num_ssd_hung_reads, num_ssd_hung_writes: drives that don't end a read, or a write (levels).
        num_ssd_unscanned: drives of which it is not known yet all that is there (level).
        num_ssd_skipped: chunks not written, by reason: ``first_touch``, ``budget``, ``busy``,
            ``unscanned``, ``hung``, ``full``, ``too_large``.
    """

    capacity_bytes: int = 0
    free_bytes: int = 0
    quarantine_bytes: int = 0
    abandoned_bytes: int = 0
    num_chunks: int = 0
    num_staging: int = 0
    num_pins: int = 0
    num_probes: int = 0
    num_found: int = 0
    num_dram_hits: int = 0
    num_ssd_hits: int = 0
    num_misses: int = 0
    pinned_bytes: int = 0
    num_puts: int = 0
    put_bytes: int = 0
    num_aborts: int = 0
    num_refused_puts: dict[str, int] = field(default_factory=dict)
    num_evicted: dict[str, int] = field(default_factory=dict)
    num_expired_reads: int = 0
    num_expired_writes: int = 0
    num_invalid_reads: int = 0
    ssd_chunks: int = 0
    ssd_bytes: int = 0
    ssd_capacity_bytes: int = 0
    ssd_written_bytes: int = 0
    ssd_read_bytes: int = 0
    num_ssd_corrupt: int = 0
    num_ssd_errors: int = 0
    num_ssd_hung_reads: int = 0
    num_ssd_hung_writes: int = 0
    num_ssd_unscanned: int = 0
    num_ssd_skipped: dict[str, int] = field(default_factory=dict)


class StoreObserver(Protocol):
    """Follows what a store holds, tier by tier; see ``StoreEventLog``.

    Called under the store's lock, in the order in which things happened: quick, and never back into
    the store.
    """

    def stored(self, tier: Tier, chunks: Sequence[Chunk]) -> None:
        """The tier has these now."""
        ...

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """The tier has these no longer."""
        ...


class ChunkStore(Protocol):
    """One user's access to a store. Any thread; no method blocks.

    Every result is in the order of the arguments. Futures are done at once where the store is in
    this process and the bytes are in memory, else soon: a caller polls ``done()``, and need not
    bound its patience, since each future ends by itself within the store's own time limits.
    """

    @property
    def arena(self) -> ArenaInfo | None:
        """Where the memory is; None while the store can't be reached. Changes with its epoch."""
        ...

    def probe(self, keys: Sequence[bytes]) -> Future[list[Residence]]:
        """Where these are. Pins nothing, and does not count as use."""
        ...

    def pin(
        self,
        keys: Sequence[bytes],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        first_bytes: int | None = None,
    ) -> Future[list[ReadHandle | None]]:
        """Permission to read, for those that are there; chunks on SSDs are brought into memory.

        Args:
            keys: of one sequence, in its order; counts as use of all of them.
            lease_s: seconds until each handle expires, at most MAX_LEASE_S.
            first_bytes: do not wait for SSDs. Handles whose tier is SSD are on memory whose bytes
                may come yet: the user reads what ``await_bytes`` said is there. These leading bytes
                of all chunks come first, then the bytes behind them. None: all are there.
        """
        ...

    def await_bytes(self, handles: Sequence[ReadHandle], beyond: int) -> Future[int]:
        """How many leading bytes of each of these chunks are in memory.

        Args:
            handles: in force.
            beyond: the answer waits until there are more, or all.

        Returns:
            The least of all chunks; no more than ``beyond`` if the rest does not come.
        """
        ...

    def release(self, handles: Sequence[ReadHandle]) -> Future[list[bool]]:
        """End reading; True: the handle was in force until now, what was read is the key's."""
        ...

    def reserve(
        self,
        chunks: Sequence[Chunk],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        copy: CopyTerms | None = None,
        is_use: bool = True,
    ) -> Future[list[WriteHandle | PutRefusal]]:
        """Memory to write chunks to; nobody sees them before they are committed.

        Args:
            chunks: of one sequence, in its order.
            lease_s: seconds until the store gives the write up, at most MAX_LEASE_S.
            copy: they were fetched from another store. Counts as a use of them; they are kept if
                there is room, or if that is worth more than what would have to go.
            is_use: counts as a use of those that are there already. False: another instance offers
                them for the same request.
        """
        ...

    def commit(self, handles: Sequence[WriteHandle]) -> Future[list[bool]]:
        """All bytes are written, by all ranks. False: too late, it is not stored."""
        ...

    def abort(self, handles: Sequence[WriteHandle]) -> Future[list[bool]]:
        """Nothing more will be written, and it is not complete. False: it was given up before."""
        ...

    def touch(self, keys: Sequence[bytes]) -> Future[None]:
        """Count as use, without reading: a prompt was served from the device's own cache.

        Args:
            keys: of one sequence, in its order, from its first chunk.
        """
        ...

    def drop(self, keys: Sequence[bytes]) -> Future[int]:
        """Forget these in all tiers; returns how many there were. Running reads end as misses."""
        ...

    def stats(self) -> Future[StoreStats | None]:
        """Counters of the whole store; None if it can't be reached."""
        ...

    def close(self) -> None:
        """End this user's handles. Nothing of it may move any more. Idempotent."""
        ...
