"""The geometry of a model's KV, and the shard of it that a rank holds."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum

from mooncake_hal.errors import PlanError


class AttentionKind(str, Enum):
    """The attention kind, which determines how KV is divided over tensor-parallel ranks."""

    GQA = "gqa"
    """Planes K and V with heads; the heads are divided over ranks."""
    MLA = "mla"
    """Planes latent and rope with a single head; every rank holds a full copy."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """A KV-cache group (vLLM's term): layers that share a request's block table.

    Args:
        layers: indices of the model's layers, ascending.
        window: sliding-window size: how many tokens each token attends to at most, itself included;
            0: no limit.
    """

    layers: tuple[int, ...]
    window: int = 0

    def first_token(self, stop: int, block_size: int) -> int:
        """The first token whose KV is needed to compute token ``stop``, rounded down to the start
        of its block: engines drop only whole blocks that have left the window."""
        if not self.window:
            return 0
        return max(0, stop - self.window + 1) // block_size * block_size

    def kept(self, tokens: tuple[int, int], prompt_stop: int, block_size: int) -> tuple[int, int]:
        """The part of a token range whose KV is needed to continue after the prompt that it belongs
        to; may be empty."""
        start, stop = tokens
        return max(start, self.first_token(prompt_stop, block_size)), stop

    def counted(self, start: int, stop: int) -> tuple[int, int]:
        """Convert a range of the model's layers to the range of the group's own layers in it."""
        return bisect_left(self.layers, start), bisect_left(self.layers, stop)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The KV of a whole model, independent of any instance.

    Args:
        kind: GQA or MLA.
        layers: number of decoder layers.
        kv_heads: KV heads of the whole model; 1 for MLA.
        plane_dims: elements per token and head of each plane: ``(head_dim, head_dim)`` for K and
            V, ``(512, 64)`` for latent and rope.
        dtype: name of the element type, such as ``"bfloat16"``.
        element_bytes: size of an element in bytes.
        unit: tokens per unit: tokens of a unit are stored interleaved and moved together. If it is
            above 1, ``plane_dims`` counts the elements of a unit, and token strides and offsets are
            those of units.
        format: order of the elements inside a unit, if it is not token after token; only instances
            with the same format can exchange KV.
        groups: the KV-cache groups, each layer in exactly one; empty if all layers share a
            request's block table. With groups, a block table has an entry per block and group:
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
    # Left out of the repr, which proxies compare, so that it equals that of older releases without
    # groups.
    groups: tuple[KVGroup, ...] = field(default=(), repr=False)

    @property
    def tables(self) -> tuple[KVGroup, ...]:
        """The group of each of a request's block tables; a single one of all layers if the model
        has no groups."""
        return self.groups or (KVGroup(tuple(range(self.layers))),)

    @property
    def planes(self) -> int:
        """Number of planes (2 for both kinds)."""
        return len(self.plane_dims)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers and heads."""
        return self.layers * self.kv_heads * sum(self.plane_dims) * self.element_bytes // self.unit


@dataclass(frozen=True, slots=True)
class KVShard:
    """The part of a model's KV that one rank holds; ranges are half open.

    Args:
        layer_start, layer_stop: the pipeline stage's range of global layer indices.
        head_start, head_stop: range of global head indices.
        replica: index of this rank among those that hold the same heads and layers.
        replicas: number of ranks that hold the same heads and layers.
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
    """Global KV heads ``[start, stop)`` of a rank: contiguous, sizes differ by at most one.

    With more ranks than heads, every rank holds one head, and neighbouring ranks hold the same one.
    """
    if tp_size >= kv_heads:
        head = tp_rank * kv_heads // tp_size
        return head, head + 1
    return tp_rank * kv_heads // tp_size, (tp_rank + 1) * kv_heads // tp_size


def layer_range(layers: int, pp_size: int, stage: int) -> tuple[int, int]:
    """Layers ``[start, stop)`` of a pipeline stage: contiguous, sizes differ by at most one.

    Earlier stages get the larger ranges, since the last one also runs the LM head and sampling.
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
            f"stage {stage} of {pp_size} has none of {geometry.layers} layers: stages are numbered "
            "from 0, and each needs at least one layer"
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
    """The shards of all ranks of an instance, ordered by stage, then by TP rank.

    Raises:
        PlanError: there are more stages than layers.
    """
    return [
        shard_of(geometry, tp_size, tp_rank, pp_size, stage)
        for stage in range(pp_size)
        for tp_rank in range(tp_size)
    ]
