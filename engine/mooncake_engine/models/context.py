"""What a forward pass is given besides its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mooncake_hal.backend import AttentionBatch


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """What a forward pass needs besides its tokens.

    Args:
        batch: which tokens attend to which KV.
        kv: by the number of a layer in the model, those of this rank: the pool's planes
            ``[num_blocks, block_size, kv_heads, dim]``.
        layer_done: told of each layer's number once its KV is written (enqueued on the device).
    """

    batch: AttentionBatch
    kv: Mapping[int, tuple[Tensor, ...]]
    layer_done: Callable[[int], None] | None = None


class AttentionWidths(NamedTuple):
    """What crosses between attention and the rest of a layer, per token: ``heads`` rows, of
    ``query`` elements on the way in and ``value`` on the way out."""

    heads: int
    query: int
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Where each token of a forward pass stands: all that a layer asks besides its attention.

    Args:
        positions: [tokens] int64, in their sequences; rows of the rotation's table.
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines.
        slots: [tokens] int64, where their KV goes; see ``AttentionBatch.slot_mapping``.
        kv: see ``ForwardContext``.
    """

    positions: Tensor
    cos_sin: Tensor
    slots: Tensor
    kv: Mapping[int, tuple[Tensor, ...]]
