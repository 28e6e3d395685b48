"""What an engine's core asks of a pool client, what it is told, and what is counted. Plain data."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from mooncake_kv.store.chunk_store import (
    MAX_TENANT_BYTES,
    Chunk,
    ChunkContent,
    CopyTerms,
    Residence,
    Tier,
)


class ChunkSource(NamedTuple):
    """Where a chunk can be loaded from.

    Args:
        store: its number; 0 is where this instance saves.
        tier: where it lies there.
    """

    store: int
    tier: Tier

    @property
    def name(self) -> str:
        """For counters: ``dram``, ``ssd``, ``remote_dram``, ``remote_ssd``."""
        return f"{'remote_' if self.store else ''}{self.tier.value}"


def nearest_sources(places: Mapping[int, Sequence[Residence]]) -> list[ChunkSource]:
    """Of each leading chunk, the number of the nearest store that has it, and the tier.

    Args:
        places: by number, what each store says of each chunk.
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
    """Where other instances find what this one saves.

    Args:
        host, port: where the store listens.
        epoch: of the store.
    """

    host: str
    port: int
    epoch: str


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Chunks to load for a request.

    Args:
        load_id: unique.
        request_id: whose.
        keys: of all its leading chunks up to the last one to load.
        sources: of each of these, where ``ChunksFound`` said that it is.
        first_chunk: the first one to load.
        skipped_tokens: of that one, tokens that the device has.
        block_ids: the request's table.
        timeout_s: for all of it.
        release_layers: see ``LoadRuns``.
        compute_s: what computing the rest of the prompt is estimated to take.
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
        save_id: unique.
        keys: of all leading chunks of the sequence up to the last one to save.
        first_chunk: the first one to save.
        block_ids: the sequence's table, as far as these chunks go.
        tenant: whose quota they count against.
        step: see ``SaveRuns``.
        copy: they came from another store, and are saved where they are worth that; else what
            another store has is not saved again. ``num_copies`` is counted by the pool client.
        token_ids: of the chunks to save; only where ``PoolStores.tells_what_is_saved``.
        is_use: see ``ChunkStore.reserve``.
        num_refused: of these chunks, the leading ones that were offered before, and refused.
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
        """What a store is told of one of them. A tenant whose name is too long for stores has no
        quota there, and what is saved for it is not published.

        Args:
            position: of the chunk.
            num_tokens, nbytes: that chunks have.
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
    """What stores have of a prompt.

    Args:
        load_id: of the look-up.
        sources: of each leading chunk, where it can be loaded from; ends before the first that is
            nowhere.
    """

    load_id: str
    sources: Sequence[ChunkSource]


@dataclass(frozen=True, slots=True)
class LoadReleased:
    """Steps may run on what a load brings from now on; they wait for each layer.

    Args:
        load_id: which.
        num_chunks: how many leading chunks the request has, if the load ends well.
    """

    load_id: str
    num_chunks: int


@dataclass(frozen=True, slots=True)
class PoolLoadEnded:
    """A load is over and drained.

    Args:
        load_id: which.
        num_chunks: so many leading chunks are right; fewer than ``LoadReleased`` said if it failed.
        error: why it failed, if it did.
    """

    load_id: str
    num_chunks: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ChunksCopied:
    """A save's chunks have been copied by all ranks: they are stored if its blocks still are what
    they were, which ``PoolClient.end_save`` says.

    Args:
        save_id: which.
        is_complete: False: nothing is stored, and nobody waits.
    """

    save_id: str
    is_complete: bool = True


PoolEvent = ChunksFound | LoadReleased | PoolLoadEnded | ChunksCopied
PostPoolEvent = Callable[[PoolEvent], None]
"""Takes an event, from any thread; must not block."""


@dataclass(slots=True)
class PoolStats:
    """Counters of one instance, and levels where it says so.

    Args:
        num_lookups: prompts that were looked up; ``num_queried_chunks`` in them.
        num_found_chunks: of these, by tier of the nearest store.
        num_prefix_hints: stores that requests have named, by what came of that.
        num_loads, num_failed_loads: begun, and ended without all that was asked for.
        num_loaded_chunks, loaded_bytes: what came of them.
        load_seconds: that loads lasted, on the slowest rank each.
        exposed_seconds: of these, until a step could begin.
        stalled_seconds: that steps waited for layers.
        hideable_seconds: of load_seconds, what the computing of the prompts could have hidden.
        num_recomputed_chunks: found, but computed again: that was estimated to be faster.
        num_waits: prompts that waited for another one's load.
        num_saves, num_saved_chunks, saved_bytes: what was stored.
        num_copied_chunks: of num_saved_chunks, those that came from another store.
        num_layerwise_saves: of num_saves, those that were copied layer by layer beside their steps.
        num_save_refusals: chunks that were not stored, by reason. Those of ``busy`` (too much is
            under way) and ``unreachable`` may have been stored later, as far as their request had
            more to save, or their blocks were still cached.
        loads_under_way, saves_under_way: now (levels).
    """

    num_lookups: int = 0
    num_queried_chunks: int = 0
    num_found_chunks: dict[str, int] = field(default_factory=dict)
    num_prefix_hints: dict[str, int] = field(default_factory=dict)
    num_loads: int = 0
    num_failed_loads: int = 0
    num_loaded_chunks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    exposed_seconds: float = 0.0
    stalled_seconds: float = 0.0
    hideable_seconds: float = 0.0
    num_recomputed_chunks: int = 0
    num_waits: int = 0
    num_saves: int = 0
    num_saved_chunks: int = 0
    saved_bytes: int = 0
    num_copied_chunks: int = 0
    num_layerwise_saves: int = 0
    num_save_refusals: dict[str, int] = field(default_factory=dict)
    loads_under_way: int = 0
    saves_under_way: int = 0

    def snapshot(self) -> PoolStats:
        """A copy that counts no more. Any thread."""
        return replace(
            self,
            num_found_chunks=dict(self.num_found_chunks),
            num_prefix_hints=dict(self.num_prefix_hints),
            num_save_refusals=dict(self.num_save_refusals),
        )

    def __add__(self, other: PoolStats) -> PoolStats:
        """What two users of one pool have counted together."""
        total: dict[str, Any] = {}
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, dict):
                names = dict.fromkeys((*mine, *theirs))
                total[each.name] = {n: mine.get(n, 0) + theirs.get(n, 0) for n in names}
            else:
                total[each.name] = mine + theirs
        return PoolStats(**total)

    def since(self, earlier: PoolStats) -> PoolStats:
        """What was counted after a snapshot; levels are differences, too."""
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
        """Of the seconds of loading that computing could hide, the share that it did: 1 where no
        step waited."""
        if self.hideable_seconds <= 0:
            return 1.0
        visible = self.exposed_seconds + self.stalled_seconds
        hidden = self.load_seconds - visible
        return min(max(hidden / self.hideable_seconds, 0.0), 1.0)
