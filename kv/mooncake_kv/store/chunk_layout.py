"""How a chunk's bytes lie in a store, and the spans between them and a rank's paged KV.

A stored chunk is the KV of ``chunk_tokens`` tokens of the *whole* model, in the order layer, plane,
head, token, element: that of a pool with one block that one rank holds all of. It says nothing of
who wrote it, so a rank of any tensor-parallel size, pipeline stage, block size and layout reads and
writes its part of it with the planner that moves KV between instances. Layers are outermost: a
layer can be loaded while those before it are computed, in one contiguous run per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.layout import KVLayout, make_layout
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer
from mooncake_hal.transport import Spans
from mooncake_kv.store.arena_allocator import GRANULE

LAYOUT_NAME = "LPBHT"


def chunk_bytes(geometry: KVGeometry, chunk_tokens: int) -> int:
    """Bytes of one stored chunk."""
    return geometry.token_bytes * chunk_tokens


def stored_layout(
    geometry: KVGeometry, chunk_tokens: int, arena_address: int, arena_bytes: int
) -> KVShardSpec:
    """A store's arena as the KV memory of one rank that holds the whole model.

    Chunks begin at multiples of GRANULE, so a "block" is a granule by its number and a chunk by
    its content: block ``i`` begins ``i * GRANULE`` bytes into the arena and has ``chunk_tokens``
    tokens.

    Args:
        geometry: of the model.
        chunk_tokens: tokens per chunk.
        arena_address: the arena's first byte, in the store's own addresses.
        arena_bytes: its length.
    """
    whole = KVShard(0, geometry.layers, 0, geometry.kv_heads)
    one = make_layout(LAYOUT_NAME, geometry, whole, 1, chunk_tokens).shifted(arena_address)
    layout = KVLayout(
        one.name,
        max(1, arena_bytes // GRANULE),
        chunk_tokens,
        one.bases,
        (GRANULE,) * geometry.planes,
        one.head_strides,
        one.token_strides,
    )
    return KVShardSpec(whole, layout)


@dataclass(frozen=True, slots=True)
class ChunkTransfer:
    """Consecutive chunks of one sequence, to be moved between a rank and a store.

    Args:
        first_chunk: position of the first in the sequence; 0 begins with token 0.
        offsets: where each lies in the arena: ``offset`` of its handle, bytes.
        local_blocks: the sequence's block table, from token 0, in the rank's block size.
        layers: half-open range of global layer numbers; None is all that the rank has.
        skipped_tokens: so many of the first chunk's tokens are not moved: the rank has them, in
            blocks that others read, too.
    """

    first_chunk: int
    offsets: Sequence[int]
    local_blocks: Sequence[int]
    layers: tuple[int, int] | None = None
    skipped_tokens: int = 0


def plan_chunks(
    geometry: KVGeometry, local: KVShardSpec, stored: KVShardSpec, transfer: ChunkTransfer
) -> Spans:
    """The spans between a rank's KV and stored chunks: to ``Peer.read`` a get, to ``write`` a put.

    Args:
        geometry: of the model; store and rank have been checked to agree on it.
        local: the rank's KV.
        stored: see ``stored_layout``.
        transfer: what to move.

    Returns:
        Spans whose ``remote`` addresses are the store's; empty if the rank has none of the layers.

    Raises:
        PlanError: the block table is too short, or an offset outside of the arena.
    """
    size, first = stored.layout.block_size, transfer.first_chunk
    blocks = [0] * first + [offset // GRANULE for offset in transfer.offsets]
    tokens = (first * size + transfer.skipped_tokens, len(blocks) * size)
    movement = BlockTransfer(transfer.local_blocks, blocks, tokens, transfer.layers)
    plans = plan_transfer(geometry, local, [stored], movement)
    if not plans:
        nothing = np.empty(0, np.uint64)
        return Spans(nothing, nothing, nothing)
    return plans[0].spans


class LayerPlans:
    """The spans of one transfer, one group of layers after the other.

    Where layers lie alike on both sides, the spans of two groups of as many layers differ by how
    far apart these lie, and only the first of them is planned.

    Args:
        geometry, local, stored: as for ``plan_chunks``.
        transfer: what to move; of which layers is asked for group by group.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        local: KVShardSpec,
        stored: KVShardSpec,
        transfer: ChunkTransfer,
    ) -> None:
        self._geometry = geometry
        self._local = local
        self._stored = stored
        self._transfer = transfer
        self._planned: dict[int, tuple[int, Spans]] = {}  # by number of layers: the first one

    def spans(self, layers: tuple[int, int]) -> Spans:
        """The spans of these layers, all of which are the rank's; see ``plan_chunks``."""
        start, stop = layers
        count = stop - start
        if count in self._planned:
            first, spans = self._planned[count]
            near = _distance(self._local, first, start, count)
            far = _distance(self._stored, first, start, count)
            if near is not None and far is not None:
                return Spans(spans.local + near, spans.remote + far, spans.nbytes)
        transfer = replace(self._transfer, layers=layers)
        spans = plan_chunks(self._geometry, self._local, self._stored, transfer)
        self._planned[count] = start, spans
        return spans


def _distance(rank: KVShardSpec, first: int, other: int, count: int) -> np.uint64 | None:
    """How far all of ``count`` layers lie behind as many others, modulo 2^64: it may be before
    them. None if they lie in another way."""
    here, there = first - rank.shard.layer_start, other - rank.shard.layer_start
    distances = {
        plane[there + layer] - plane[here + layer]
        for plane in rank.layout.bases
        for layer in range(count)
    }
    return np.uint64(distances.pop() % (1 << 64)) if len(distances) == 1 else None


def writes_for_its_replicas(shard: KVShard, spread: int) -> bool:
    """Whether this rank saves what it holds, of all the ranks that hold the same.

    Args:
        shard: the rank's.
        spread: any number that all ranks agree on, such as a chunk's position: replicas take turns.
    """
    return spread % shard.replicas == shard.replica
