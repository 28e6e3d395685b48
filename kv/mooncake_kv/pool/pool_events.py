"""The requests of an engine's core to ``PoolClient``, its events in return, and its counters. Plain
data."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.store.chunk_store import (
    MAX_TENANT_BYTES,
    Chunk,
    ChunkContent,
    CopyTerms,
    PutRefusal,
    Residence,
    Tier,
)


class ChunkSource(NamedTuple):
    """Where a chunk can be loaded from.

    Args:
        store: number of the store; 0 is ``PoolStores.home``.
        tier: the tier that has the chunk.
    """

    store: int
    tier: Tier

    @property
    def name(self) -> str:
        """Label for counters: ``dram``, ``ssd``, ``remote_dram`` or ``remote_ssd``."""
        return f"{'remote_' if self.store else ''}{self.tier.value}"


def nearest_sources(places: Mapping[int, Sequence[Residence]]) -> list[ChunkSource]:
    """The nearest source of each leading chunk, up to the first one that no store has.

    Args:
        places: the probe result of each store, by its number.
    """
    found: list[ChunkSource] = []
    for at in zip(*places.values(), strict=True):
        by_tier = [
            (wanted is Residence.SSD, number)
            for wanted in (Residence.DRAM, Residence.SSD)
            for number, place in zip(places, at, strict=True)
            if place is wanted
        ]
        if not by_tier:
            break
        is_ssd, number = min(by_tier)
        found.append(ChunkSource(number, Tier.SSD if is_ssd else Tier.DRAM))
    return found


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """The address of a store that an instance uses, for other instances.

    Args:
        host, port: where the store listens.
        epoch: the store's epoch.
    """

    host: str
    port: int
    epoch: str


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What an instance reports to routers of a store that it uses. In addresses a wildcard means
    the host of ``location``, else the instance's.

    Args:
        location: where other instances reach the store; None if they can't.
        kv_events: where the store publishes KV events; None if it does not.
        metrics: HOST:PORT of the metrics of a store in another process; None if it serves none.
    """

    location: StoreLocation | None = None
    kv_events: KVEventEndpoints | None = None
    metrics: str | None = None


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Chunks to load for a request.

    Args:
        load_id: unique id of the load.
        request_id: the request that the load is for.
        keys: keys of all its leading chunks up to the last one to load.
        sources: source of each of these chunks, from ``ChunksFound``.
        first_chunk: position of the first chunk to load.
        skipped_tokens: leading tokens of that chunk that the device has already.
        block_ids: the request's block table; as in ``ChunkTransfer``.
        timeout_s: timeout of the whole load in seconds.
        release_layers: see ``LoadRuns``.
        compute_s: estimated seconds to compute the rest of the prompt.
    """

    load_id: str
    request_id: str
    keys: Sequence[bytes]
    sources: Sequence[ChunkSource]
    first_chunk: int
    skipped_tokens: int
    block_ids: Sequence[int]
    timeout_s: float
    release_layers: int | None
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Chunks to save.

    Args:
        save_id: unique id of the save.
        keys: keys of all leading chunks of the sequence up to the last one to save.
        first_chunk: position of the first chunk to save.
        block_ids: the sequence's block table, as far as these chunks go; as in ``ChunkTransfer``.
        tenant: the tenant whose quota they count against.
        step: see ``SaveRuns``.
        copy: set if the chunks came from another store; they are saved if the copy is worth it. The
            pool client sets ``num_copies``. None: chunks that another store has are not saved.
        token_ids: tokens of the chunks to save; only where ``PoolStores.publishes_saves``.
        is_use: see ``ChunkStore.reserve``.
        num_refused: number of these chunks, from the first, whose save was refused before.
    """

    save_id: str
    keys: Sequence[bytes]
    first_chunk: int
    block_ids: Sequence[int]
    tenant: str = ""
    step: int | None = None
    copy: CopyTerms | None = None
    token_ids: Sequence[int] = ()
    is_use: bool = True
    num_refused: int = 0

    def chunk(self, position: int, num_tokens: int, nbytes: int, namespace: bytes) -> Chunk:
        """The description of one chunk for a store. A tenant whose name is too long for stores has
        no quota there, and its chunks are not published.

        Args:
            position: position of the chunk.
            num_tokens, nbytes: tokens and bytes per chunk.
            namespace: see ``ChunkContent``.
        """
        is_named = len(self.tenant.encode()) <= MAX_TENANT_BYTES
        content = None
        if self.token_ids and is_named:
            start = (position - self.first_chunk) * num_tokens
            token_ids = array("I", self.token_ids[start : start + num_tokens])
            content = ChunkContent(namespace, token_ids.tobytes())
        return Chunk(
            self.keys[position],
            self.keys[position - 1] if position else None,
            position,
            nbytes,
            num_tokens,
            self.tenant if is_named else "",
            content,
        )


@dataclass(frozen=True, slots=True)
class ChunksFound:
    """Event: the result of a look-up.

    Args:
        load_id: id of the look-up.
        sources: source of each leading chunk, up to the first one that no store has.
    """

    load_id: str
    sources: Sequence[ChunkSource]


@dataclass(frozen=True, slots=True)
class LoadReleased:
    """Event: steps may run the request of a load from now on, and wait for its layers.

    Args:
        load_id: id of the load.
        num_chunks: leading chunks that the request will have if the load succeeds.
    """

    load_id: str
    num_chunks: int


@dataclass(frozen=True, slots=True)
class PoolLoadEnded:
    """Event: a load has ended, and no transfer of it is in flight.

    Args:
        load_id: id of the load.
        num_chunks: leading chunks that are valid; fewer than in ``LoadReleased`` if it failed.
        error: why it failed; None if it succeeded.
    """

    load_id: str
    num_chunks: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ChunksCopied:
    """Event: all ranks have copied a save's chunks. The core must answer with
    ``PoolClient.end_save`` whether the blocks were unchanged; only then are the chunks stored.

    Args:
        save_id: id of the save.
        is_complete: False if the save has failed: nothing is stored, and no answer is expected.
        refused_chunk: position of the first chunk for which the store has no memory at present, or
            did not reply, or, if the save has failed, that was not copied. It and the later ones
            may be offered again later. None: there is no such chunk.
    """

    save_id: str
    is_complete: bool = True
    refused_chunk: int | None = None


PoolEvent = ChunksFound | LoadReleased | PoolLoadEnded | ChunksCopied
PostPoolEvent = Callable[[PoolEvent], None]
"""Receives an event; called on any thread, must not block."""


KNOWN_KINDS: Mapping[str, Sequence[str]] = {
    "num_found_chunks": ("dram", "ssd", "remote_dram", "remote_ssd"),
    "num_prefix_hints": (
        *("found", "nothing_there", "own", "late", "restarted"),
        *("unreachable", "not_allowed", "too_many"),
    ),
    "num_save_refusals": (
        *(each.value for each in PutRefusal),
        *("busy", "elsewhere", "failed", "late", "reused"),
    ),
}
"""The keys of the fields of ``PoolStats`` that are mappings, if these are known."""

POOL_STATS_HELP: Mapping[str, str] = {
    "num_lookups": "Prompts that were looked up in stores.",
    "num_queried_chunks": "Chunks of the prompts that were looked up.",
    "num_found_chunks": "Chunks that were found by look-ups, by tier of the nearest store.",
    "num_prefix_hints": "Hints of requests about stores that hold their prefix, by outcome.",
    "num_loads": "Loads of prompts from stores that were started.",
    "num_failed_loads": "Loads that ended without all requested chunks, except those that their "
    "request no longer needed.",
    "num_loaded_chunks": "Chunks that loads delivered.",
    "loaded_bytes": "Bytes of KV that the ranks read in loads that succeeded.",
    "loaded_bytes_by_transport": "Bytes of KV that the ranks read in loads that succeeded, by "
    "transport.",
    "load_seconds": "Seconds that loads took, each on its slowest rank.",
    "exposed_seconds": "Seconds of loads before a step of their request could start.",
    "stalled_seconds": "Seconds that steps waited for layers of loads.",
    "hideable_seconds": "Seconds of loads that computing the prompts' rest could have hidden.",
    "num_recomputed_chunks": "Chunks that were found but computed, since that was estimated to be "
    "faster.",
    "num_waits": "Prompts that waited for the load of another prompt.",
    "num_saves": "Saves that stored at least one chunk.",
    "num_saved_chunks": "Chunks that saves stored.",
    "saved_bytes": "Bytes of KV that saves stored.",
    "saved_bytes_by_transport": "Bytes of KV that the ranks wrote in saves that succeeded, by "
    "transport.",
    "num_copied_chunks": "Stored chunks that came from another store.",
    "num_layerwise_saves": "Saves that were copied layer by layer during the steps.",
    # those of ``busy`` (too many saves in flight), ``unreachable`` and lack of memory may have been
    # stored later, if their request had more to save, or their blocks were still cached
    "num_save_refusals": "Chunks that were not stored when they were offered, by reason.",
    "loads_in_flight": "Loads in flight now.",
    "saves_in_flight": "Saves in flight now.",
    # data-parallel ranks share them
    "num_stores": "Stores that --kv-pool names, the instance's own included.",
    "num_connected_stores": "Stores that --kv-pool names and that can be used now.",
}
"""What the fields of ``PoolStats`` count, in which unit: the help texts of their metrics."""

_SHARED = frozenset({"num_stores", "num_connected_stores"})
"""The fields of ``PoolStats`` about what several pool clients share."""


@dataclass(slots=True)
class PoolStats:
    """Counters of one instance, and gauges; ``POOL_STATS_HELP`` says what each of them counts."""

    num_lookups: int = 0
    num_queried_chunks: int = 0
    num_found_chunks: dict[str, int] = field(default_factory=dict)
    num_prefix_hints: dict[str, int] = field(default_factory=dict)
    num_loads: int = 0
    num_failed_loads: int = 0
    num_loaded_chunks: int = 0
    loaded_bytes: int = 0
    loaded_bytes_by_transport: dict[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0
    exposed_seconds: float = 0.0
    stalled_seconds: float = 0.0
    hideable_seconds: float = 0.0
    num_recomputed_chunks: int = 0
    num_waits: int = 0
    num_saves: int = 0
    num_saved_chunks: int = 0
    saved_bytes: int = 0
    saved_bytes_by_transport: dict[str, int] = field(default_factory=dict)
    num_copied_chunks: int = 0
    num_layerwise_saves: int = 0
    num_save_refusals: dict[str, int] = field(default_factory=dict)
    loads_in_flight: int = 0
    saves_in_flight: int = 0
    num_stores: int = 0
    num_connected_stores: int = 0

    def begin_transports(self, names: Iterable[str]) -> None:
        """Count from 0 on for transports that may be used: Prometheus would not see the increase
        from nothing to the first bytes."""
        for name in names:
            self.loaded_bytes_by_transport.setdefault(name, 0)
            self.saved_bytes_by_transport.setdefault(name, 0)

    def snapshot(self) -> PoolStats:
        """A copy of the current values. Thread-safe."""
        return replace(
            self,
            num_found_chunks=dict(self.num_found_chunks),
            num_prefix_hints=dict(self.num_prefix_hints),
            num_save_refusals=dict(self.num_save_refusals),
            loaded_bytes_by_transport=dict(self.loaded_bytes_by_transport),
            saved_bytes_by_transport=dict(self.saved_bytes_by_transport),
        )

    def __add__(self, other: PoolStats) -> PoolStats:
        """The sum of the counters of two pool clients."""
        total: dict[str, Any] = {}
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, dict):
                names = dict.fromkeys((*mine, *theirs))
                total[each.name] = {n: mine.get(n, 0) + theirs.get(n, 0) for n in names}
            elif each.name in _SHARED:
                total[each.name] = max(mine, theirs)
            else:
                total[each.name] = mine + theirs
        return PoolStats(**total)

    def since(self, earlier: PoolStats) -> PoolStats:
        """The change since an earlier snapshot; for gauges the difference, too."""
        change: dict[str, Any] = {}
        for each in fields(self):
            now, before = getattr(self, each.name), getattr(earlier, each.name)
            if isinstance(now, dict):
                change[each.name] = {n: count - before.get(n, 0) for n, count in now.items()}
            else:
                change[each.name] = now - before
        return PoolStats(**change)

    @property
    def overlap_ratio(self) -> float:
        """Fraction of the loading time that computing could hide and did: 1 if no step waited."""
        if self.hideable_seconds <= 0:
            return 1.0
        visible = self.exposed_seconds + self.stalled_seconds
        hidden = self.load_seconds - visible
        return min(max(hidden / self.hideable_seconds, 0.0), 1.0)
