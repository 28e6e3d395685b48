"""The transfer planner: computes the spans that move the KV which one rank needs from the ranks
that have it.

One formula serves every tensor-parallel ratio, block size, pipeline split and layout. A rank's KV
is a box (layers x heads x tokens). The plan of a transfer is, for each elected source, the
intersection of its box with the destination's, cut at the block boundaries of both sides and merged
where it is contiguous on both sides. The planner is pure and vectorised; it accesses no KV memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import PlanError
from mooncake_hal.kv.geometry import KVGeometry, KVGroup, KVShard
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.transport import Spans

Offsets = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVShardSpec:
    """One rank's KV: its shard of the model's KV, and the layout in which the shard is stored."""

    shard: KVShard
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Which tokens of which blocks to move.

    Args:
        local_blocks, remote_blocks: block tables; entry i holds tokens
            ``[i * block_size, (i + 1) * block_size)`` in that side's own block size. If the
            geometry has groups, a table has an entry per block and group; see ``KVGeometry``.
        tokens: half-open range of token positions.
        layers: half-open range of global layer indices, of which the local rank's are moved; None:
            all layers.
        spread: selects among replicas, so that requests spread over the ranks that hold the same
            heads; any integer.
        prompt_stop: end position of the prompt that the tokens belong to, from which sliding
            windows reach back. None: the end of ``tokens``.
    """

    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]
    tokens: tuple[int, int]
    layers: tuple[int, int] | None = None
    spread: int = 0
    prompt_stop: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PeerSpans:
    """The spans between this rank and one rank of the other side.

    Args:
        peer: index of that rank in the ``remotes`` of ``plan_transfer``.
        spans: ``local`` addresses are in the planning rank's memory, ``remote`` ones in the peer's.
    """

    peer: int
    spans: Spans


def plan_transfer(
    geometry: KVGeometry,
    local: KVShardSpec,
    remotes: Sequence[KVShardSpec],
    transfer: BlockTransfer,
) -> list[PeerSpans]:
    """Plan the spans between ``local`` and the remote ranks that hold the KV which it needs.

    Args:
        geometry: the model's geometry; the handshake has checked that both sides have the same.
        local: the rank that plans, such as the reader of a pull.
        remotes: all ranks of the other side.
        transfer: the tokens, blocks and layers to move.

    Raises:
        PlanError: a block table is too short, or the remotes don't cover ``local`` exactly.
    """
    if geometry.groups:
        return _plan_groups(geometry, local, remotes, transfer)
    if geometry.unit > 1:
        return _plan_units(geometry, local, remotes, transfer)
    start, stop = transfer.tokens
    own = _page("local", local, transfer.local_blocks, transfer.tokens)
    paged = [_page("remote", remote, transfer.remote_blocks, transfer.tokens) for remote in remotes]
    wanted = local.shard
    if transfer.layers is not None:
        wanted = intersect(wanted, KVShard(*transfer.layers, wanted.head_start, wanted.head_stop))
    if start >= stop or not wanted.layers:
        return []
    plans = []
    for peer in elect_sources(wanted, [remote.shard for remote in remotes], transfer.spread):
        pair = _RankPair(
            geometry,
            intersect(wanted, remotes[peer].shard),
            own,
            paged[peer],
        )
        plans.append(PeerSpans(peer, pair.spans(start, stop)))
    _check_coverage(geometry, wanted, stop - start, plans)
    return plans


def _plan_units(
    geometry: KVGeometry,
    local: KVShardSpec,
    remotes: Sequence[KVShardSpec],
    transfer: BlockTransfer,
) -> list[PeerSpans]:
    """Plan a transfer whose tokens are stored in units: to the formula, a unit is a token.

    A unit that the token range covers only in part is moved whole.
    """
    unit = geometry.unit
    start, stop = transfer.tokens

    def in_units(rank: KVShardSpec) -> KVShardSpec:
        layout = rank.layout
        if layout.block_size % unit:
            raise PlanError(
                f"blocks of {layout.block_size} tokens are not a multiple of units of {unit} tokens"
            )
        return KVShardSpec(rank.shard, replace(layout, block_size=layout.block_size // unit))

    return plan_transfer(
        replace(geometry, unit=1),
        in_units(local),
        [in_units(remote) for remote in remotes],
        replace(transfer, tokens=(start // unit, -(-stop // unit))),
    )


def _plan_groups(
    geometry: KVGeometry,
    local: KVShardSpec,
    remotes: Sequence[KVShardSpec],
    transfer: BlockTransfer,
) -> list[PeerSpans]:
    """Plan every KV-cache group as if its layers were the whole model, and join the plans."""
    prompt_stop = transfer.tokens[1] if transfer.prompt_stop is None else transfer.prompt_stop
    num_groups = len(geometry.groups)
    spans: dict[int, list[Spans]] = {}
    for index, group in enumerate(geometry.groups):
        tokens = group.kept(transfer.tokens, prompt_stop, local.layout.block_size)
        layers = group.counted(*(transfer.layers or (0, geometry.layers)))
        if tokens[0] >= tokens[1] or layers[0] >= layers[1]:
            continue
        part = replace(
            transfer,
            local_blocks=transfer.local_blocks[index::num_groups],
            remote_blocks=transfer.remote_blocks[index::num_groups],
            tokens=tokens,
            layers=layers,
        )
        for plan in plan_transfer(
            replace(geometry, layers=len(group.layers), groups=()),
            part_of_group(local, group),
            [part_of_group(remote, group) for remote in remotes],
            part,
        ):
            spans.setdefault(plan.peer, []).append(plan.spans)
    return [PeerSpans(peer, join_spans(parts)) for peer, parts in sorted(spans.items())]


def part_of_group(rank: KVShardSpec, group: KVGroup) -> KVShardSpec:
    """A rank's part of a KV-cache group; layers are numbered within the group, from 0."""
    shard, layout = rank.shard, rank.layout
    first, last = group.counted(shard.layer_start, shard.layer_stop)
    held = [layer - shard.layer_start for layer in group.layers[first:last]]
    bases = tuple(tuple(plane[layer] for layer in held) for plane in layout.bases)
    return KVShardSpec(
        replace(shard, layer_start=first, layer_stop=last), replace(layout, bases=bases)
    )


def join_spans(parts: Sequence[Spans]) -> Spans:
    """All spans of several plans, at least one, in one object."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.local, part.remote, part.nbytes) for part in parts), strict=True)
    return Spans(*(np.concatenate(column) for column in columns))


def intersect(a: KVShard, b: KVShard) -> KVShard:
    """The layers and heads that both shards hold; ranges are empty if there are none."""
    layer_start = max(a.layer_start, b.layer_start)
    head_start = max(a.head_start, b.head_start)
    return KVShard(
        layer_start,
        max(layer_start, min(a.layer_stop, b.layer_stop)),
        head_start,
        max(head_start, min(a.head_stop, b.head_stop)),
    )


def elect_sources(wanted: KVShard, shards: Sequence[KVShard], spread: int) -> list[int]:
    """Choose one source rank for each part of ``wanted``; ``spread`` selects among replicas.

    Raises:
        PlanError: no rank holds a part, or ranks with different shards overlap on it.
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
class _PagedKV:
    """A rank's KV cache together with the blocks of a range of one sequence's tokens; the first of
    them is entry ``first`` of its block table."""

    rank: KVShardSpec
    blocks: Offsets
    first: int

    def token_offsets(self, positions: Offsets, plane: int) -> Offsets:
        """Offset of each token position from the first token of block 0."""
        layout = self.rank.layout
        blocks = self.blocks[positions // layout.block_size - self.first]
        within = positions % layout.block_size
        return blocks * layout.block_strides[plane] + within * layout.token_strides[plane]

    def bases(self, box: KVShard, plane: int) -> Offsets:
        """Address of the box's first head in block 0, for each layer of the box."""
        shard, layout = self.rank.shard, self.rank.layout
        first = box.layer_start - shard.layer_start
        head = (box.head_start - shard.head_start) * layout.head_strides[plane]
        return np.asarray(layout.bases[plane][first : first + box.layers], dtype=np.int64) + head

    def head_offsets(self, box: KVShard, plane: int) -> Offsets:
        """Offset of each head of the box from its first head."""
        return np.arange(box.heads, dtype=np.int64) * self.rank.layout.head_strides[plane]

    def plane_offsets(self, box: KVShard, planes: tuple[int, ...]) -> Offsets:
        """Offset of each of these planes from the first of them."""
        firsts = [int(self.bases(box, plane)[0]) for plane in planes]
        return np.asarray(firsts, dtype=np.int64) - firsts[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Axis:
    """Offsets of one axis's elements on both sides."""

    local: Offsets
    remote: Offsets

    def step(self) -> int | None:
        """The stride, if it is uniform and the same on both sides."""
        steps = np.diff(self.local)
        if (steps == steps[0]).all() and (np.diff(self.remote) == steps[0]).all():
            return int(steps[0])
        return None

    def continues(self, run: int) -> bool:
        """Whether any element is at distance ``run`` from its predecessor on both sides."""
        return bool(((np.diff(self.local) == run) & (np.diff(self.remote) == run)).any())

    def local_stride(self) -> int:
        """The mean stride on the local side."""
        return int(self.local[-1] - self.local[0]) // max(1, len(self.local) - 1)


class _Runs(NamedTuple):
    """Contiguous runs before they are merged; all [n]."""

    local: Offsets
    remote: Offsets
    nbytes: Offsets


@dataclass(frozen=True, slots=True)
class _RankPair:
    """Two ranks, the box of layers and heads that both hold, and each side's memory of it."""

    geometry: KVGeometry
    box: KVShard
    local: _PagedKV
    remote: _PagedKV

    def spans(self, start: int, stop: int) -> Spans:
        """All spans of a range of tokens, merged."""
        starts, lengths = self._token_pieces(start, stop)
        # One piece length at a time, since `_expand` needs a rectangle: all pieces are as long as a
        # block (of the smaller block size), except the first and the last.
        parts = [
            self._expand(starts[lengths == length], int(length), planes)
            for length in np.unique(lengths)
            for planes in self._plane_groups()
        ]
        return _merge(_Runs(*(np.concatenate(columns) for columns in zip(*parts, strict=True))))

    def _token_pieces(self, start: int, stop: int) -> tuple[Offsets, Offsets]:
        """Cut a token range at the block boundaries of both sides; returns starts and lengths.

        Consecutive tokens are in consecutive slots only within a block. So inside a piece, and only
        there, the next token is one stride away on both sides.
        """
        cuts = [np.array([start, stop], dtype=np.int64)]
        for size in {side.rank.layout.block_size for side in (self.local, self.remote)}:
            cuts.append(np.arange((start // size + 1) * size, stop, size, dtype=np.int64))
        edges = np.unique(np.concatenate(cuts))
        return edges[:-1], np.diff(edges)

    def _plane_groups(self) -> list[tuple[int, ...]]:
        """Planes of the same width and strides form one axis; other planes are planned separately.

        K and V are alike in every layout, so a run can continue from one into the other. Latent and
        rope rows differ in width, so that their strides and runs have nothing in common.
        """
        num_planes = self.geometry.planes
        alike = len(set(self.geometry.plane_dims)) == 1
        for side in (self.local, self.remote):
            layout = side.rank.layout
            strides = set(
                zip(layout.block_strides, layout.head_strides, layout.token_strides, strict=True)
            )
            layer_gaps = {tuple(np.diff(side.bases(self.box, p))) for p in range(num_planes)}
            alike = alike and len(strides) == 1 and len(layer_gaps) == 1
        if alike:
            return [tuple(range(num_planes))]
        return [(plane,) for plane in range(num_planes)]

    def _expand(self, starts: Offsets, length: int, planes: tuple[int, ...]) -> _Runs:
        """The runs of the token pieces that begin at ``starts`` and are all ``length`` tokens long.

        Memory is strided along every axis but one: the block table may assign any block, and the
        rest of an address is base + token * stride + head * stride + layer + plane. So on each
        side, an address in the box is a sum of one offset per axis, and the addresses of all runs
        are the outer sum of the axes' offsets. A pull of a thousand blocks of eighty layers takes a
        few array additions, where a loop would create a million Python objects.

        The number of runs stays small because axes can be folded into them. A run starts as the
        elements of one token, head, layer and plane. An axis whose stride equals the run's current
        length on *both* sides continues the run: folding it makes the run longer without adding
        runs. The order in which axes fold depends on both layouts (tokens come before heads in
        BHLPT and after them in LPBTH; between these two neither folds), so `_fold` repeats until no
        axis folds.

        The remaining axes are ordered by stride, the largest outermost. Neighbours in memory are
        then neighbours in the arrays, and `_merge` joins those that are adjacent only through the
        block table, such as consecutive blocks. If no blocks are adjacent, the token pieces become
        the outermost axis: the same strides then repeat for each of them, and transports can
        describe them compactly.
        """
        box, lead = self.box, planes[0]
        tokens = np.arange(length, dtype=np.int64)
        local, remote = self.local, self.remote
        bases = _Axis(local.bases(box, lead), remote.bases(box, lead))
        axes = [
            _Axis(
                tokens * local.rank.layout.token_strides[lead],
                tokens * remote.rank.layout.token_strides[lead],
            ),
            _Axis(local.head_offsets(box, lead), remote.head_offsets(box, lead)),
            _Axis(bases.local - bases.local[0], bases.remote - bases.remote[0]),
            _Axis(local.plane_offsets(box, planes), remote.plane_offsets(box, planes)),
        ]
        element_bytes = self.geometry.plane_dims[lead] * self.geometry.element_bytes
        axes, run = _fold([axis for axis in axes if len(axis.local) > 1], element_bytes)
        pieces = _Axis(local.token_offsets(starts, lead), remote.token_offsets(starts, lead))
        can_merge = pieces.continues(run)
        axes += [pieces] if can_merge else []
        axes.sort(key=_Axis.local_stride, reverse=True)
        axes = axes if can_merge else [pieces, *axes]
        near, far = bases.local[0], bases.remote[0]
        for axis in axes:
            near, far = np.add.outer(near, axis.local), np.add.outer(far, axis.remote)
        near, far = np.ravel(near), np.ravel(far)
        return _Runs(near, far, np.full(len(near), run, dtype=np.int64))


def _fold(axes: list[_Axis], run: int) -> tuple[list[_Axis], int]:
    """Fold every axis whose stride equals the run's length on both sides into the run; returns the
    remaining axes and the new length."""
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


def _merge(runs: _Runs) -> Spans:
    """Join neighbouring runs that are contiguous on both sides, such as those of consecutive
    blocks."""
    local, remote, nbytes = runs
    breaks = np.empty(len(local), dtype=bool)
    breaks[0] = True
    breaks[1:] = (local[1:] != local[:-1] + nbytes[:-1]) | (remote[1:] != remote[:-1] + nbytes[:-1])
    heads = np.flatnonzero(breaks)
    sums = np.add.reduceat(nbytes, heads)
    return Spans(
        local[heads].astype(np.uint64), remote[heads].astype(np.uint64), sums.astype(np.uint64)
    )


def _page(
    which: str, rank: KVShardSpec, blocks: Sequence[int], tokens: tuple[int, int]
) -> _PagedKV:
    """Cut a block table to a range of tokens. A push plans each layer of each chunk of a prompt,
    so that reading the whole table would make its time quadratic in the prompt.

    Raises:
        PlanError: the table is too short, or names a block that does not exist.
    """
    layout, (start, stop) = rank.layout, tokens
    first = start // layout.block_size
    needed = -(-stop // layout.block_size)
    if len(blocks) < needed:
        raise PlanError(
            f"{stop} tokens need {needed} {which} blocks of {layout.block_size}, "
            f"the table has {len(blocks)}"
        )
    wanted = blocks[first:needed]
    outside = [block for block in wanted if not 0 <= block < layout.num_blocks]
    if outside:
        raise PlanError(f"{which} block {outside[0]} is not in a pool of {layout.num_blocks}")
    return _PagedKV(rank, np.asarray(wanted, dtype=np.int64), first)


def _check_coverage(
    geometry: KVGeometry, wanted: KVShard, tokens: int, plans: Sequence[PeerSpans]
) -> None:
    """Check that the plans write every byte of the destination exactly once.

    A gap would go unnoticed later: memory that is not written still has an older request's KV, and
    the model would continue from it. No span leaves the destination's box, so the right number of
    bytes in spans that don't overlap is exact coverage.

    Raises:
        PlanError: the spans have the wrong total size or overlap.
    """
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
