"""The inputs of a model's layers: their rank's share of the heads, and the step's tokens and KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mooncake_engine.errors import ConfigError
from mooncake_engine.scheduling.step_plan import ExpertRound
from mooncake_hal.backend import AttentionBatch
from mooncake_hal.kv.geometry import head_range


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of a rank, as half-open ranges of the model's heads.

    Args:
        query_start, query_stop: the query heads.
        kv_start, kv_stop: the key/value heads that these queries attend to.
    """

    query_start: int
    query_stop: int
    kv_start: int
    kv_stop: int

    @property
    def query_heads(self) -> int:
        """The number of query heads."""
        return self.query_stop - self.query_start

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.kv_stop - self.kv_start


def share_heads(num_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int) -> HeadShare:
    """The heads of one rank: the key/value heads of its KV shard, and their query heads.

    If several ranks hold the same key/value head, its query heads are divided among them, unevenly
    if necessary.

    Raises:
        ConfigError: some rank would have no query head.
    """
    group = num_heads // num_kv_heads
    kv_start, kv_stop = head_range(num_kv_heads, tp_size, tp_rank)
    sharers = [
        rank
        for rank in range(tp_size)
        if head_range(num_kv_heads, tp_size, rank) == (kv_start, kv_stop)
    ]
    largest = max(1, -(-tp_size // num_kv_heads))
    if largest > group:
        raise ConfigError(
            f"tensor parallel over {tp_size} ranks needs {largest} query heads per key/value "
            f"head, the model has {group} ({num_heads} query, {num_kv_heads} key/value heads); "
            f"use at most {num_heads} ranks"
        )
    if len(sharers) == 1:
        return HeadShare(kv_start * group, kv_stop * group, kv_start, kv_stop)
    index, count = sharers.index(tp_rank), len(sharers)
    first = kv_start * group
    return HeadShare(
        first + index * group // count, first + (index + 1) * group // count, kv_start, kv_stop
    )


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """The inputs of a forward pass other than its tokens.

    Args:
        batch: the attention batch: which tokens attend to which KV.
        kv: by the model's number of each layer that this rank holds, the planes of its KV,
            ``[num_blocks, block_size, kv_heads, dim]``.
        layer_done: called with each layer's number once its KV writes are enqueued on the device.
        expert_round: see ``StepPlan``.
    """

    batch: AttentionBatch
    kv: Mapping[int, tuple[Tensor, ...]]
    layer_done: Callable[[int], None] | None = None
    expert_round: ExpertRound | None = None


class AttentionWidths(NamedTuple):
    """The shape per token of the input and output of a layer's attention.

    Args:
        heads: rows per token.
        query: elements per row of the input.
        value: elements per row of the output.
    """

    heads: int
    query: int
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenSlots:
    """The inputs of a layer outside of attention: the tokens' positions and KV slots, and the round
    of data-parallel ranks.

    Args:
        positions: [tokens] int64, positions in their sequences; rows of ``cos_sin``.
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines.
        slot_mapping: [tokens] int64, the slots to write KV to: see ``AttentionBatch``.
        kv, expert_round: see ``ForwardContext``.
    """

    positions: Tensor
    cos_sin: Tensor
    slot_mapping: Tensor
    kv: Mapping[int, tuple[Tensor, ...]]
    expert_round: ExpertRound | None = None
