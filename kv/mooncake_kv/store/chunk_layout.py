"""The byte layout of stored chunks, and the spans between them and a rank's paged KV.

A stored chunk is the KV of ``chunk_tokens`` tokens of the *whole* model, in the order layer, plane,
head, token, element: the layout of a KV cache with one block, on a single rank. It does not depend
on the writer, so a rank of any tensor-parallel size, pipeline stage, block size and layout reads
and writes its part of it with the planner that moves KV between instances. Layers are outermost, so
that a layer can be loaded while the layers before it are computed, in one contiguous run per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mooncake_hal.kv.geometry import KVGeometry, KVGroup, KVShard
from mooncake_hal.kv.layout import KVLayout, make_layout
from mooncake_hal.kv.transfer_plan import (
    BlockTransfer,
    KVShardSpec,
    join_spans,
    part_of_group,
    plan_transfer,
)
from mooncake_hal.transport import Spans
from mooncake_kv.store.arena_allocator import GRANULE

LAYOUT_NAME = "LPBHT"


def chunk_bytes(geometry: KVGeometry, chunk_tokens: int) -> int:
    """Bytes of one stored chunk."""
    return geometry.token_bytes * chunk_tokens


def stored_layout(
    geometry: KVGeometry, chunk_tokens: int, arena_address: int, arena_bytes: int
) -> KVShardSpec:
    """Describe a store's arena as the KV memory of one rank that holds the whole model.

    Chunks begin at multiples of GRANULE. So block ``i`` of this layout begins ``i * GRANULE`` bytes
    into the arena, and extends over one chunk of ``chunk_tokens`` tokens.

    Args:
        geometry: geometry of the model's KV.
        chunk_tokens: tokens per chunk.
        arena_address: the arena's first byte, in the store's own address space.
        arena_bytes: length of the arena.
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
    """Consecutive chunks of one sequence to move between a rank and a store.

    Args:
        first_chunk: position of the first chunk in the sequence; 0 begins with token 0.
        offsets: offset of each chunk in the arena in bytes, as in its handle.
        local_blocks: the sequence's block table, from token 0, in the rank's block size. If the
            geometry has groups, with an entry per block and group; see ``KVGeometry``.
        skipped_tokens: number of leading tokens of the first chunk that are not moved: the rank has
            them already, in blocks that it shares with other sequences.
        window_stop: token that is computed next, from which sliding windows reach back: of a group
            with a window, only blocks inside it are moved. None: all are, whether they are in the
            window or not.
    """

    first_chunk: int
    offsets: Sequence[int]
    local_blocks: Sequence[int]
    skipped_tokens: int = 0
    window_stop: int | None = None


class LayerPlans:
    """Plans one transfer between a rank's KV and stored chunks, range of layers by range of layers.

    Args:
        geometry: geometry of the model's KV; store and rank have been checked to agree on it.
        local: the rank's KV.
        stored: the arena's layout, from ``stored_layout``.
        transfer: the chunks to move.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        local: KVShardSpec,
        stored: KVShardSpec,
        transfer: ChunkTransfer,
    ) -> None:
        size, groups = stored.layout.block_size, geometry.tables
        self._plans: list[tuple[KVGroup, _GroupPlans]] = []
        for index, group in enumerate(groups):
            skipped = transfer.skipped_tokens
            if transfer.window_stop is not None:
                kept = group.first_token(transfer.window_stop, local.layout.block_size)
                skipped = max(skipped, kept - transfer.first_chunk * size)
            if skipped >= len(transfer.offsets) * size:
                continue
            plans = _GroupPlans(
                replace(geometry, layers=len(group.layers), groups=()),
                part_of_group(local, group),
                part_of_group(stored, group),
                replace(
                    transfer,
                    local_blocks=transfer.local_blocks[index :: len(groups)],
                    skipped_tokens=skipped,
                ),
            )
            self._plans.append((group, plans))

    def spans(self, layers: tuple[int, int]) -> Spans:
        """Plan the spans of a half-open range of global layer numbers: for ``Peer.read`` to load
        them, for ``Peer.write`` to save them.

        Returns:
            Spans whose ``remote`` addresses are the store's; empty if the rank has none of the
            layers.

        Raises:
            PlanError: the block table is too short, or an offset outside of the arena.
        """
        parts = []
        for group, plans in self._plans:
            start, stop = group.counted(*layers)
            if start < stop:
                parts.append(plans.spans((start, stop)))
        return join_spans(parts) if parts else _no_spans()


class _GroupPlans:
    """``LayerPlans`` of one KV-cache group, whose layers are numbered from 0.

    Where both sides lay out their layers uniformly, the spans of two ranges with the same number of
    layers differ by a constant distance. Then only the first range is planned, and the others are
    shifted.
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
        self._planned: dict[int, tuple[int, Spans]] = {}  # by number of layers: the first range's

    def spans(self, layers: tuple[int, int]) -> Spans:
        """The spans of these layers."""
        start, stop = layers
        count = stop - start
        if count in self._planned:
            first, spans = self._planned[count]
            near = _distance(self._local, first, start, count)
            far = _distance(self._stored, first, start, count)
            if near is not None and far is not None:
                return Spans(spans.local + near, spans.remote + far, spans.nbytes)
        spans = self._plan(layers)
        self._planned[count] = start, spans
        return spans

    def _plan(self, layers: tuple[int, int]) -> Spans:
        transfer, size = self._transfer, self._stored.layout.block_size
        first = transfer.first_chunk
        blocks = [0] * first + [offset // GRANULE for offset in transfer.offsets]
        tokens = (first * size + transfer.skipped_tokens, len(blocks) * size)
        movement = BlockTransfer(transfer.local_blocks, blocks, tokens, layers)
        plans = plan_transfer(self._geometry, self._local, [self._stored], movement)
        return plans[0].spans if plans else _no_spans()


def _no_spans() -> Spans:
    nothing = np.empty(0, np.uint64)
    return Spans(nothing, nothing, nothing)


def _distance(rank: KVShardSpec, first: int, other: int, count: int) -> np.uint64 | None:
    """The distance in bytes from ``count`` layers at ``first`` to as many at ``other``, modulo 2^64
    since it may be negative. None if it is not the same for all of these layers and planes."""
    here, there = first - rank.shard.layer_start, other - rank.shard.layer_start
    distances = {
        plane[there + layer] - plane[here + layer]
        for plane in rank.layout.bases
        for layer in range(count)
    }
    return np.uint64(distances.pop() % (1 << 64)) if len(distances) == 1 else None


def writes_for_its_replicas(shard: KVShard, spread: int) -> bool:
    """Whether this rank is the one that saves a shard of which several ranks hold replicas.

    Args:
        shard: the rank's shard.
        spread: a number on which all ranks agree, such as a chunk's position; balances the saves
            over the replicas.
    """
    return spread % shard.replicas == shard.replica
