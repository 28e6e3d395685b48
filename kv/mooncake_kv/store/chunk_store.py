"""The interface of a store: ``ChunkStore``, which clients use to save and load KV, local or remote.

A store holds chunks (see ``chunk_keys``) in an arena of host memory, and may hold more on SSDs.
Messages carry keys and handles only. The KV bytes are moved by the client's ranks, with one-sided
reads and writes of the arena, over any transport that reaches it:

    put    reserve -> each rank writes its part of the arena -> commit, or abort
    get    pin -> each rank reads its part of the arena -> release: was the handle still in force?

A handle is a permission with a deadline. Bytes that were read are valid only once ``release`` has
returned True for the handle: it was in force throughout, so the bytes belong to its key. A writer
calls ``commit`` or ``abort`` only when none of its transfers is in flight any more; the memory of a
writer that calls neither is not reused until its processes are known to have exited. ``probe``
neither pins nor renews anything: chunks that it found may be evicted before the next call.

A failure is a miss. Where a store is full, slow, dead, restarted or unreachable, futures resolve to
ABSENT, None, False or a refusal; they never hold an exception.
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
"""Default lease of a handle in seconds; longer than the timeout of a transfer."""

MAX_LEASE_S = 120.0
"""Upper bound of a lease in seconds; longer ones are shortened to it."""

MAX_KEY_BYTES = 64
MAX_TENANT_BYTES = 512
MAX_NAMESPACE_BYTES = 64


class Tier(str, Enum):
    """The medium on which a store holds a chunk."""

    DRAM = "dram"
    SSD = "ssd"


class Residence(str, Enum):
    """What a probe found for a key."""

    ABSENT = "absent"
    STAGING = "staging"
    """A writer has reserved it and not committed it yet; a later probe may find it."""
    DRAM = "dram"
    SSD = "ssd"


class PutRefusal(str, Enum):
    """Why a store does not let a client write a chunk."""

    PRESENT = "present"
    """The store has the chunk already, so it counts as saved."""
    STAGING = "staging"
    """Another writer has reserved it."""
    NO_SPACE = "no_space"
    """No memory can be freed: all of it is pinned, being written or in quarantine."""
    OVER_QUOTA = "over_quota"
    """The tenant's quota is smaller than the chunk, or all of its chunks are pinned."""
    TOO_LARGE = "too_large"
    """The chunk is larger than the arena."""
    LOW_VALUE = "low_value"
    """A copy of a chunk of another store, worth less than the chunks it would evict."""
    UNREACHABLE = "unreachable"
    """The store did not reply."""


EVICTION_REASONS = ("room", "copy", "quota", "drop")
"""The keys of ``StoreStats.num_evicted``."""

SSD_SKIP_REASONS = ("first_touch", "budget", "busy", "unscanned", "hung", "full", "too_large")
"""The keys of ``StoreStats.num_ssd_skipped``."""


class ChunkContent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens whose KV a chunk holds, for stores that publish KV events.

    Args:
        namespace: ``KVIdentity.root`` without a salt: tells models apart, since one store holds the
            KV of many.
        token_ids: the chunk's tokens, 4 bytes each, little-endian.
    """

    namespace: bytes
    token_ids: bytes


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The description of a chunk, without its bytes. A msgspec Struct like the handles, because one
    batch creates about a thousand of them.

    Args:
        key: its chunk key; KEY_BYTES bytes.
        parent: the key of the chunk before it in its sequence; None for the first.
        position: number of chunks before it in its sequence.
        nbytes: ``chunk_layout.chunk_bytes`` of the model.
        num_tokens: tokens per chunk.
        tenant: the tenant whose quota it counts against, which is the ``cache_salt`` of its
            requests; empty for none.
        content: its tokens; set where the store publishes KV events and the salt is the tenant.

    Raises:
        ValueError: a number or length is out of range.
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
                f"wanted a chunk with 1 byte, 1 token and position 0 or more, got {self.nbytes} "
                f"bytes, {self.num_tokens} tokens, position {self.position}"
            )
        lengths = (len(self.key), len(self.parent or b"-"), len(self.tenant.encode()))
        if not (0 < lengths[0] <= MAX_KEY_BYTES and 0 < lengths[1] <= MAX_KEY_BYTES):
            raise ValueError(
                f"wanted keys of 1 to {MAX_KEY_BYTES} bytes, got key and parent of {lengths[:2]}"
            )
        if lengths[2] > MAX_TENANT_BYTES:
            raise ValueError(
                f"wanted a tenant's name of up to {MAX_TENANT_BYTES} bytes, got {lengths[2]}"
            )
        if self.content is not None and len(self.content.namespace) > MAX_NAMESPACE_BYTES:
            raise ValueError(
                f"wanted a namespace of up to {MAX_NAMESPACE_BYTES} bytes, got "
                f"{len(self.content.namespace)}"
            )
        if self.content is not None and len(self.content.token_ids) != 4 * self.num_tokens:
            raise ValueError(
                f"wanted {4 * self.num_tokens} bytes for {self.num_tokens} tokens, got "
                f"{len(self.content.token_ids)}"
            )


@dataclass(frozen=True, slots=True)
class CopyTerms:
    """The costs of chunks that other stores hold too, which decide whether a copy pays; see
    ``copy_worth``.

    Args:
        num_copies: number of stores that hold them; 1 or more.
        refetch_s: seconds to fetch one chunk from another store again.
        recompute_s: seconds to compute one chunk when all chunks before it are available.

    Raises:
        ValueError: ``num_copies`` is below 1, or a time is not positive and finite.
    """

    num_copies: int
    refetch_s: float
    recompute_s: float

    def __post_init__(self) -> None:
        is_time = 0 < self.refetch_s < math.inf and 0 < self.recompute_s < math.inf
        if self.num_copies < 1 or not is_time:
            raise ValueError(f"wanted 1 copy or more and positive, finite times, got {self}")


class ReadHandle(msgspec.Struct, frozen=True, gc=False):
    """Permission to read a chunk's bytes.

    Args:
        handle_id: unique within the store's epoch.
        key: the chunk's key.
        offset: where the chunk begins in the arena, in bytes; a multiple of GRANULE.
        nbytes: its length.
        generation: number of this use of the memory: counts the chunks that the store has put.
        lease_s: seconds that the handle lasts, from when the store granted it.
        tier: the tier that had the chunk. A chunk from an SSD is in the arena by now like all
            others, unless it was pinned with ``first_bytes``.
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
    """Where to map a store's shared index; see ``residence_index``.

    Args:
        path: path of its file, for processes of the same host and user.
        nbytes: length of the file.
    """

    path: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """Where a store's arena is and how to reach it.

    Args:
        epoch: identifies one start of the store; a restarted store has a new epoch, and no handle
            of the former one is valid.
        address: first byte, in the store's own address space: the remote side of spans.
        nbytes: length of the arena.
        endpoints: opaque address by transport, for ``Transports.connect``.
        index: the shared index, which processes of the same host may probe without a message.
        kv_events: where the store publishes KV events, a wildcard address meaning the store's
            host. Clients of such a store set ``Chunk.content``.
        metrics: HOST:PORT of its own metrics, with ``*`` for all addresses of its host; None if it
            serves none.
    """

    epoch: str
    address: int
    nbytes: int
    endpoints: Mapping[str, bytes] = field(default_factory=dict)
    index: IndexInfo | None = None
    kv_events: KVEventEndpoints | None = None
    metrics: str | None = None

    def layout(self, geometry: KVGeometry, chunk_tokens: int) -> KVShardSpec:
        """The arena's layout as if it was a rank, to plan transfers; see
        ``chunk_layout.LayerPlans``."""
        return stored_layout(geometry, chunk_tokens, self.address, self.nbytes)


@dataclass(slots=True)
class StoreStats:
    """Counters since the store's start, and gauges, which are marked as such.

    Args:
        capacity_bytes, free_bytes: size of the arena and its free part (gauges).
        quarantine_bytes: freed memory that a reader or writer past its deadline might still access
            (gauge).
        abandoned_bytes: memory of writers that are past their deadline or without a session, and
            have neither committed nor aborted (gauge).
        tenant_bytes, tenant_quota_bytes: memory in use, and its limit, of each tenant that has a
            quota (gauges).
        num_chunks, num_staging, num_pins: chunks in memory, chunks being written, read handles
            (gauges).
        num_probes, num_found: keys that were probed, and those of them that were found.
        num_dram_hits, num_ssd_hits, num_misses: keys of pins, by outcome.
        pinned_bytes: bytes of all chunks that were pinned.
        num_puts, put_bytes: chunks that were committed, and their bytes.
        num_aborts: writes that were aborted or missed their deadline.
        num_refused_puts: chunks of clients that got no memory, by ``PutRefusal``.
        num_refused_loads: chunks on SSDs that got no memory to be loaded to, by ``PutRefusal``.
        num_evicted: chunks evicted from memory, by reason: ``room``, ``copy`` (a copy of another
            store's chunk, evicted to free memory), ``quota``, ``drop``.
        num_expired_reads, num_expired_writes: handles whose deadline passed: leaks of clients.
        num_invalid_reads: releases that returned False.
        ssd_chunks, ssd_bytes, ssd_capacity_bytes: what SSDs hold and can hold (gauges).
        ssd_written_bytes, ssd_read_bytes: record bytes written to and read from SSDs.
        ssd_write_bytes_per_day, ssd_budget_bytes: the limit of bytes written to SSDs, 0 for none,
            and how many of them may be written now (gauges).
        num_ssd_corrupt: records that failed their checksum, and were removed from the index.
        num_ssd_errors: reads and writes that failed with an I/O error, and segments whose headers
            could not be read at start.
        num_ssd_hung_reads, num_ssd_hung_writes: drives with a read, or a write, past its timeout
            (gauges).
        num_ssd_unscanned: drives whose scan at start has not completed (gauge).
        num_ssd_skipped: chunks that were not written to SSDs, by reason: ``first_touch``,
            ``budget``, ``busy``, ``unscanned``, ``hung``, ``full``, ``too_large``.
    """

    capacity_bytes: int = 0
    free_bytes: int = 0
    quarantine_bytes: int = 0
    abandoned_bytes: int = 0
    tenant_bytes: dict[str, int] = field(default_factory=dict)
    tenant_quota_bytes: dict[str, int] = field(default_factory=dict)
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
    num_refused_loads: dict[str, int] = field(default_factory=dict)
    num_evicted: dict[str, int] = field(default_factory=dict)
    num_expired_reads: int = 0
    num_expired_writes: int = 0
    num_invalid_reads: int = 0
    ssd_chunks: int = 0
    ssd_bytes: int = 0
    ssd_capacity_bytes: int = 0
    ssd_written_bytes: int = 0
    ssd_read_bytes: int = 0
    ssd_write_bytes_per_day: int = 0
    ssd_budget_bytes: int = 0
    num_ssd_corrupt: int = 0
    num_ssd_errors: int = 0
    num_ssd_hung_reads: int = 0
    num_ssd_hung_writes: int = 0
    num_ssd_unscanned: int = 0
    num_ssd_skipped: dict[str, int] = field(default_factory=dict)


class StoreObserver(Protocol):
    """Receives a notification whenever a tier of a store gains or loses chunks; see
    ``StoreEventLog``.

    The store calls it with its lock held, in the order of the changes: methods must return quickly
    and must not call the store.
    """

    def stored(self, tier: Tier, chunks: Sequence[Chunk]) -> None:
        """The tier holds these chunks now."""
        ...

    def removed(self, tier: Tier, keys: Sequence[bytes]) -> None:
        """The tier no longer holds these chunks."""
        ...


class ChunkStore(Protocol):
    """One user's access to a store. Thread-safe; no method blocks.

    Results are in the order of the arguments. A future is already done where the store is in this
    process and the bytes are in memory. Every other one resolves within the store's own timeouts,
    so callers may poll ``done()`` without a timeout of their own.
    """

    @property
    def arena(self) -> ArenaInfo | None:
        """The store's arena; None while the store can't be reached. Changes with its epoch."""
        ...

    def probe(self, keys: Sequence[bytes]) -> Future[list[Residence]]:
        """Look up where these chunks are. Pins nothing, and does not count as a use."""
        ...

    def pin(
        self,
        keys: Sequence[bytes],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        first_bytes: int | None = None,
    ) -> Future[list[ReadHandle | None]]:
        """Get permission to read chunks; None for each that is missing. Chunks on SSDs are read
        into memory first.

        Args:
            keys: keys of one sequence, in its order; counts as a use of all of them.
            lease_s: seconds until each handle expires, at most MAX_LEASE_S.
            first_bytes: return before SSD reads complete. A handle whose tier is SSD covers memory
                that is still being filled, and the user reads only the leading bytes that
                ``await_bytes`` has reported. The first ``first_bytes`` of all chunks are read
                first, then the rest. None: wait until all bytes are in memory.
        """
        ...

    def await_bytes(self, handles: Sequence[ReadHandle], beyond: int) -> Future[int]:
        """Wait for chunks that are being read from SSDs.

        Args:
            handles: handles that are in force.
            beyond: the future resolves once more than this many leading bytes of every chunk are
                in memory, or all bytes are.

        Returns:
            The number of leading bytes in memory, the minimum over all chunks; at most ``beyond``
            if the remaining reads have failed.
        """
        ...

    def release(self, handles: Sequence[ReadHandle]) -> Future[list[bool]]:
        """End reads. True: the handle was in force until now, so the bytes read are the key's."""
        ...

    def reserve(
        self,
        chunks: Sequence[Chunk],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        copy: CopyTerms | None = None,
        is_use: bool = True,
    ) -> Future[list[WriteHandle | PutRefusal]]:
        """Reserve memory to write chunks to. They are not readable before ``commit``.

        Args:
            chunks: chunks of one sequence, in its order.
            lease_s: seconds until the store expires the write, at most MAX_LEASE_S.
            copy: set for chunks that were fetched from another store. Counts as a use of them; they
                are kept if memory is free, or if they are worth more than the chunks to evict.
            is_use: whether this counts as a use of the chunks that the store has already. False
                where another instance saves them for the same request.
        """
        ...

    def commit(self, handles: Sequence[WriteHandle]) -> Future[list[bool]]:
        """Make chunks readable, once all ranks have written all bytes. False: the handle had
        expired, and the chunk is not stored."""
        ...

    def abort(
        self, handles: Sequence[WriteHandle], *, may_still_arrive: bool = False
    ) -> Future[list[bool]]:
        """End incomplete writes, once none of their transfers is in flight. False: the handle had
        expired already.

        Args:
            handles: the writes to end.
            may_still_arrive: a transfer has failed, over a transport that does not stop writes with
                it (``Transport.stops_writes_on_failure``): the memory is quarantined.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> Future[None]:
        """Count a use without a read: a prompt was served from the device's prefix cache.

        Args:
            keys: keys of one sequence, in its order, from its first chunk.
        """
        ...

    def drop(self, keys: Sequence[bytes]) -> Future[int]:
        """Remove chunks from all tiers; returns how many there were. Running reads of them end as
        misses."""
        ...

    def stats(self) -> Future[StoreStats | None]:
        """Counters of the whole store; None if it can't be reached."""
        ...

    def close(self) -> None:
        """End this user's handles. None of its transfers may be in flight. Idempotent."""
        ...
