"""What KV a model has, and which part of it a rank holds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum

from mooncake_hal.errors import PlanError


class AttentionKind(str, Enum):
    """How a model's KV is split over tensor-parallel ranks."""

    GQA = "gqa"
    """Planes K and V with heads; heads are divided over ranks."""
    MLA = "mla"
    """Planes latent and rope with a single head; every rank holds all of it."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV a request has in the same blocks: a KV-cache group, as vLLM calls it.

    Args:
        layers: which of the model's; rising.
        window: how many tokens each token attends to at most, itself among them (sliding-window
            attention); 0: all before it.
    """

    layers: tuple[int, ...]
    window: int = 0

    def first_token(self, stop: int, block_size: int) -> int:
        """The first token whose KV is needed to go on behind token ``stop - 1``: that of a block,
        since engines drop whole blocks that have left the window."""
        if not self.window:
            return 0
        return max(0, stop - self.window + 1) // block_size * block_size

    def kept(self, tokens: tuple[int, int], prompt_stop: int, block_size: int) -> tuple[int, int]:
        """Those of a range of tokens whose KV is needed to go on behind the prompt that they are a
        part of; maybe none."""
        start, stop = tokens
        return max(start, self.first_token(prompt_stop, block_size)), stop

    def counted(self, start: int, stop: int) -> tuple[int, int]:
        """The group's part of a range of the model's layers, counted within the group."""
        return bisect_left(self.layers, start), bisect_left(self.layers, stop)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The KV of a model, whole, independent of any instance.

    Args:
        kind: GQA or MLA.
        layers: decoder layers.
        kv_heads: heads of the whole model; 1 for MLA.
        plane_dims: elements per token and head of each plane: ``(head_dim, head_dim)`` for K and
            V, ``(512, 64)`` for latent and rope.
        dtype: name of the element type, such as ``"bfloat16"``.
        element_bytes: its size.
        unit: tokens that lie in one piece and are moved as one. Above 1, ``plane_dims`` counts the
            elements of such a piece, and the strides and offsets of tokens are those of pieces.
        format: how elements are ordered inside a piece, where that is not token after token; only
            instances of one format understand each other's.
        groups: where not all layers have a request's KV in the same blocks: each layer in one of
            them. A request's block table has an entry per block and group then, block by block:
            entry ``i * len(groups) + g`` is the i-th block of group g.
    """

    kind: AttentionKind
    layers: int
    kv_heads: int
    plane_dims: tuple[int, ...]
    dtype: str
    element_bytes: int
    unit: int = 1
    format: str = "linear"
    # Not in its text, which proxies compare: releases without groups have the same one.
    groups: tuple[KVGroup, ...] = field(default=(), repr=False)

    @property
    def tables(self) -> tuple[KVGroup, ...]:
        """Whose KV each of a request's block tables is: the groups', or all layers'."""
        return self.groups or (KVGroup(tuple(range(self.layers))),)

    @property
    def planes(self) -> int:
        """How many planes there are (2 for both kinds)."""
        return len(self.plane_dims)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers and heads."""
        return self.layers * self.kv_heads * sum(self.plane_dims) * self.element_bytes // self.unit


@dataclass(frozen=True, slots=True)
class KVShard:
    """The part of a model's KV that one rank holds; ranges are half open.

    Args:
        layer_start, layer_stop: pipeline stage.
        head_start, head_stop: global head indices.
        replica: which copy of these heads this is.
        replicas: how many ranks hold the same heads and layers.
    """

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    replica: int = 0
    replicas: int = 1

    @property
    def layers(self) -> int:
        """Number of layers held."""
        return self.layer_stop - self.layer_start

    @property
    def heads(self) -> int:
        """Number of heads held."""
        return self.head_stop - self.head_start


def head_range(kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Global KV heads ``[start, stop)`` of a rank: contiguous, uneven sizes differ by at most one.

    With more ranks than heads every rank holds one head, and neighbouring ranks share it.
    """
    if tp_size >= kv_heads:
        head = tp_rank * kv_heads // tp_size
        return head, head + 1
    return tp_rank * kv_heads // tp_size, (tp_rank + 1) * kv_heads // tp_size


def layer_range(layers: int, pp_size: int, stage: int) -> tuple[int, int]:
    """Layers ``[start, stop)`` of a pipeline stage: contiguous, sizes differ by at most one.

    Earlier stages get the larger ones: the last has the head and the sampling besides.
    """
    return -(-stage * layers // pp_size), -(-(stage + 1) * layers // pp_size)


def shard_of(
    geometry: KVGeometry, tp_size: int, tp_rank: int, pp_size: int = 1, stage: int = 0
) -> KVShard:
    """The shard of one tensor-parallel rank of a pipeline stage.

    Raises:
        PlanError: the rank is not in the group, or the stage has no layer.
    """
    if not 0 <= tp_rank < tp_size:
        raise PlanError(f"rank {tp_rank} is not in a tensor-parallel group of {tp_size}")
    if not 0 <= stage < pp_size <= geometry.layers:
        raise PlanError(
            f"stage {stage} of {pp_size} has none of {geometry.layers} layers: stages count from "
            "0, and each takes a layer or more"
        )
    layer_start, layer_stop = layer_range(geometry.layers, pp_size, stage)
    if geometry.kind is AttentionKind.MLA:
        return KVShard(layer_start, layer_stop, 0, 1, tp_rank, tp_size)
    start, stop = head_range(geometry.kv_heads, tp_size, tp_rank)
    peers = [
        rank
        for rank in range(tp_size)
        if head_range(geometry.kv_heads, tp_size, rank) == (start, stop)
    ]
    return KVShard(layer_start, layer_stop, start, stop, peers.index(tp_rank), len(peers))


def shards_of(geometry: KVGeometry, tp_size: int, pp_size: int = 1) -> list[KVShard]:
    """The shards of all ranks of an instance: stage after stage, and within one by TP rank.

    Raises:
        PlanError: there are more stages than layers.
    """
    return [
        shard_of(geometry, tp_size, tp_rank, pp_size, stage)
        for stage in range(pp_size)
        for tp_rank in range(tp_size)
    ]
