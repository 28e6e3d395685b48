"""What a model's layers are given: their rank's share, and the step's tokens and KV."""

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
    """A rank's heads; ranges are half open and global.

    Args:
        query_start, query_stop: query heads.
        kv_start, kv_stop: the key/value heads that they look at.
    """

    query_start: int
    query_stop: int
    kv_start: int
    kv_stop: int

    @property
    def query_heads(self) -> int:
        """How many query heads."""
        return self.query_stop - self.query_start

    @property
    def kv_heads(self) -> int:
        """How many key/value heads."""
        return self.kv_stop - self.kv_start


def share_heads(num_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int) -> HeadShare:
    """Heads of one rank: key/value heads as the KV's sharding says, queries along with them.

    Where several ranks hold the same key/value head, its queries are divided among them, unevenly
    if need be.

    Raises:
        ConfigError: some rank would be left without a query head.
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
    """What a forward pass needs besides its tokens.

    Args:
        batch: which tokens attend to which KV.
        kv: by the number of a layer in the model, those of this rank: the pool's planes
            ``[num_blocks, block_size, kv_heads, dim]``.
        layer_done: called with each layer's number once its KV is written (enqueued on the device).
        expert_round: see ``StepPlan``.
    """

    batch: AttentionBatch
    kv: Mapping[int, tuple[Tensor, ...]]
    layer_done: Callable[[int], None] | None = None
    expert_round: ExpertRound | None = None


class AttentionWidths(NamedTuple):
    """What crosses between attention and the rest of a layer, per token: ``heads`` rows, of
    ``query`` elements on the way in and ``value`` on the way out."""

    heads: int
    query: int
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenSlots:
    """What a layer needs to know of a forward pass besides attention's batch: its tokens' positions
    and KV slots, and who else takes part.

    Args:
        positions: [tokens] int64, in their sequences; rows of the rotation's table.
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines.
        slot_mapping: [tokens] int64, where their KV goes: see ``AttentionBatch``.
        kv, expert_round: see ``ForwardContext``.
    """

    positions: Tensor
    cos_sin: Tensor
    slot_mapping: Tensor
    kv: Mapping[int, tuple[Tensor, ...]]
    expert_round: ExpertRound | None = None
