"""What a forward pass is given besides its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Which rows of the rotation's table the tokens take.

    Args:
        positions: [tokens] int64.
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines.
    """

    positions: Tensor
    cos_sin: Tensor
