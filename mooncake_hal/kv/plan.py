"""Which bytes go where: the intersection of what one rank has and another needs.

One formula serves every tensor-parallel ratio, block size, pipeline split and layout. A rank's KV
is a box (layers x heads x tokens); the plan of a transfer is, for each elected source, the
intersection of its box with the destination's, cut at block borders of both sides and merged
where it is contiguous on both sides. Pure and vectorised; nothing here looks at memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import PlanError
from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.transport import Spans

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVPlacement:
    """One rank's KV: which part of the model's it is, and where it lies."""

    shard: KVShard
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class Movement:
    """Which tokens of which blocks to move.

    Args:
        local_blocks, remote_blocks: block tables; entry i holds tokens
            ``[i * block_size, (i + 1) * block_size)`` in that side's own block size.
        tokens: half-open range of token positions.
        layers: half-open range of global layer indices; None means all. What the local rank has
            of them is moved.
        spread: picks among replicas, so that requests spread over the ranks that hold the same
            heads; any integer.
    """

    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]
    tokens: tuple[int, int]
    layers: tuple[int, int] | None = None
    spread: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PeerSpans:
    """What to move between this rank and one rank of the other side.

    Args:
        peer: index into the sequence of placements that was planned against.
        spans: ``local`` is the planning rank's memory, ``remote`` the peer's.
    """

    peer: int
    spans: Spans


def plan_transfer(
    geometry: KVGeometry,
    local: KVPlacement,
    remotes: Sequence[KVPlacement],
    movement: Movement,
) -> list[PeerSpans]:
    """Plan the spans between ``local`` and a set of remote ranks that hold all it needs.

    Args:
        geometry: of the model; both sides have been checked to agree on it.
        local: the rank that plans: the reader of a pull.
        remotes: every rank of the other side.
        movement: what to move.

    Raises:
        PlanError: the block tables are too short, or the remotes don't cover ``local`` exactly.
    """
    start, stop = movement.tokens
    _check_table("local", local.layout, movement.local_blocks, stop)
    for remote in remotes:
        _check_table("remote", remote.layout, movement.remote_blocks, stop)
    wanted = local.shard
    if movement.layers is not None:
        wanted = intersect(wanted, KVShard(*movement.layers, wanted.head_start, wanted.head_stop))
    if start >= stop or not wanted.layers:
        return []
    plans = []
    for peer in elect_sources(wanted, [remote.shard for remote in remotes], movement.spread):
        box = intersect(wanted, remotes[peer].shard)
        sides = (
            _Side(local, movement.local_blocks),
            _Side(remotes[peer], movement.remote_blocks),
        )
        plans.append(PeerSpans(peer, _spans_of_box(geometry, box, sides, movement.tokens)))
    _check_coverage(geometry, wanted, stop - start, plans)
    return plans


def intersect(a: KVShard, b: KVShard) -> KVShard:
    """The layers and heads that both hold; empty ranges where there are none."""
    layer_start = max(a.layer_start, b.layer_start)
    head_start = max(a.head_start, b.head_start)
    return KVShard(
        layer_start,
        max(layer_start, min(a.layer_stop, b.layer_stop)),
        head_start,
        max(head_start, min(a.head_stop, b.head_stop)),
    )


def elect_sources(wanted: KVShard, shards: Sequence[KVShard], spread: int) -> list[int]:
    """Choose one holder of each part of ``wanted``; replicas take turns by ``spread``.

    Raises:
        PlanError: a part that nobody holds, or that distinct holders overlap on.
    """
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    for index, shard in enumerate(shards):
        key = (shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop)
        groups.setdefault(key, []).append(index)
    elected = []
    covered = 0
    for members in groups.values():
        box = intersect(wanted, shards[members[0]])
        if box.layers and box.heads:
            elected.append(members[spread % len(members)])
            covered += box.layers * box.heads
    if covered != wanted.layers * wanted.heads:
        raise PlanError(
            f"layers {wanted.layer_start}..{wanted.layer_stop - 1}, heads "
            f"{wanted.head_start}..{wanted.head_stop - 1} make {wanted.layers * wanted.heads} "
            f"(layer, head) pairs, but the peer's ranks hold {covered} of them: {list(groups)}"
        )
    return elected


@dataclass(frozen=True, slots=True)
class _Side:
    placement: KVPlacement
    blocks: Sequence[int]

    def token_addresses(self, starts: Offsets, plane: int) -> Offsets:
        """Offset of each of these token positions from block 0."""
        layout = self.placement.layout
        blocks = np.asarray(self.blocks, dtype=np.int64)[starts // layout.block_size]
        within = starts % layout.block_size
        return blocks * layout.block_strides[plane] + within * layout.token_strides[plane]

    def bases(self, box: KVShard, plane: int) -> Offsets:
        """Address of the box's first head in block 0, for each layer of the box."""
        shard, layout = self.placement.shard, self.placement.layout
        first = box.layer_start - shard.layer_start
        head = (box.head_start - shard.head_start) * layout.head_strides[plane]
        return np.asarray(layout.bases[plane][first : first + box.layers], dtype=np.int64) + head

    def heads(self, box: KVShard, plane: int) -> Offsets:
        """Offset of each head of the box from its first one."""
        return np.arange(box.heads, dtype=np.int64) * self.placement.layout.head_strides[plane]


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """Offsets of one axis' elements on both sides."""

    local: Offsets
    remote: Offsets

    def step(self) -> int | None:
        """The stride, if it is uniform and the same on both sides."""
        steps = np.diff(self.local)
        if (steps == steps[0]).all() and (np.diff(self.remote) == steps[0]).all():
            return int(steps[0])
        return None


def _spans_of_box(
    geometry: KVGeometry, box: KVShard, sides: tuple[_Side, _Side], tokens: tuple[int, int]
) -> Spans:
    """All spans of one peer, merged. Pieces of one length at a time: the edges are the odd ones."""
    starts, lengths = _token_pieces(tokens, [side.placement.layout.block_size for side in sides])
    parts = []
    for length in np.unique(lengths):
        for planes in _plane_groups(geometry, box, sides):
            parts.append(
                _expand(geometry, box, sides, (starts[lengths == length], int(length)), planes)
            )
    local, remote, nbytes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return _merge(local, remote, nbytes)


def _token_pieces(tokens: tuple[int, int], block_sizes: Sequence[int]) -> tuple[Offsets, Offsets]:
    """Cut a token range at every block border of either side: starts and lengths."""
    start, stop = tokens
    cuts = [np.array([start, stop], dtype=np.int64)]
    for size in block_sizes:
        cuts.append(np.arange((start // size + 1) * size, stop, size, dtype=np.int64))
    edges = np.unique(np.concatenate(cuts))
    return edges[:-1], np.diff(edges)


def _plane_groups(
    geometry: KVGeometry, box: KVShard, sides: tuple[_Side, _Side]
) -> list[tuple[int, ...]]:
    """Planes that share widths and strides are one axis; others are planned one by one."""
    alike = len(set(geometry.plane_dims)) == 1
    for side in sides:
        layout = side.placement.layout
        strides = zip(layout.block_strides, layout.head_strides, layout.token_strides, strict=True)
        gaps = {tuple(np.diff(side.bases(box, plane))) for plane in range(geometry.planes)}
        alike = alike and len(set(strides)) == 1 and len(gaps) == 1
    if alike:
        return [tuple(range(geometry.planes))]
    return [(plane,) for plane in range(geometry.planes)]


def _expand(
    geometry: KVGeometry,
    box: KVShard,
    sides: tuple[_Side, _Side],
    pieces: tuple[Offsets, int],
    planes: tuple[int, ...],
) -> tuple[Offsets, Offsets, Offsets]:
    """Spans of equally long token pieces: fold contiguous axes into a run, broadcast the rest."""
    starts, length = pieces
    lead = planes[0]
    run = geometry.plane_dims[lead] * geometry.element_bytes
    bases = [side.bases(box, lead) for side in sides]
    token_strides = [side.placement.layout.token_strides[lead] for side in sides]
    steps = np.arange(length, dtype=np.int64)
    inner = [
        _Axis(steps * token_strides[0], steps * token_strides[1]),
        _Axis(*(side.heads(box, lead) for side in sides)),
        _Axis(*(base - base[0] for base in bases)),
        _Axis(*(_plane_offsets(side, box, planes) for side in sides)),
    ]
    axes, run = _fold([axis for axis in inner if len(axis.local) > 1], run)
    axes.append(_Axis(*(side.token_addresses(starts, lead) for side in sides)))
    axes.sort(key=lambda axis: -int(axis.local[-1] - axis.local[0]) // max(1, len(axis.local) - 1))
    local, remote = bases[0][0], bases[1][0]
    for axis in axes:
        local = np.add.outer(local, axis.local)
        remote = np.add.outer(remote, axis.remote)
    local, remote = np.ravel(local), np.ravel(remote)
    return local, remote, np.full(len(local), run, dtype=np.int64)


def _plane_offsets(side: _Side, box: KVShard, planes: tuple[int, ...]) -> Offsets:
    firsts = [int(side.bases(box, plane)[0]) for plane in planes]
    return np.asarray(firsts, dtype=np.int64) - firsts[0]


def _fold(axes: list[_Axis], run: int) -> tuple[list[_Axis], int]:
    """Grow the contiguous run by every axis whose stride is the run, on both sides."""
    folded = True
    while folded:
        folded = False
        for axis in axes:
            if axis.step() == run:
                run *= len(axis.local)
                axes = [other for other in axes if other is not axis]
                folded = True
                break
    return axes, run


def _merge(local: Offsets, remote: Offsets, nbytes: Offsets) -> Spans:
    """Join neighbours that are contiguous on both sides (runs of consecutive blocks)."""
    breaks = np.empty(len(local), dtype=bool)
    breaks[0] = True
    breaks[1:] = (local[1:] != local[:-1] + nbytes[:-1]) | (remote[1:] != remote[:-1] + nbytes[:-1])
    heads = np.flatnonzero(breaks)
    sums = np.add.reduceat(nbytes, heads)
    return Spans(
        local[heads].astype(np.uint64), remote[heads].astype(np.uint64), sums.astype(np.uint64)
    )


def _check_table(which: str, layout: KVLayout, blocks: Sequence[int], tokens: int) -> None:
    needed = -(-tokens // layout.block_size)
    if len(blocks) < needed:
        raise PlanError(
            f"{tokens} tokens need {needed} {which} blocks of {layout.block_size}, "
            f"the table has {len(blocks)}"
        )
    outside = [block for block in blocks[:needed] if not 0 <= block < layout.num_blocks]
    if outside:
        raise PlanError(f"{which} block {outside[0]} is not in a pool of {layout.num_blocks}")


def _check_coverage(
    geometry: KVGeometry, wanted: KVShard, tokens: int, plans: Sequence[PeerSpans]
) -> None:
    """Success means exact coverage: every byte of the destination once, no byte twice."""
    per_token = sum(geometry.plane_dims) * geometry.element_bytes
    expected = wanted.layers * wanted.heads * tokens * per_token
    starts = np.concatenate([plan.spans.local for plan in plans])
    ends = starts + np.concatenate([plan.spans.nbytes for plan in plans])
    order = np.argsort(starts, kind="stable")
    total = int((ends - starts).sum())
    if total != expected or (starts[order][1:] < ends[order][:-1]).any():
        raise PlanError(
            f"a plan of {total} bytes for a destination of {expected}, or one that writes a byte "
            "twice: the layouts given contradict each other"
        )
