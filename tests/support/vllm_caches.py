"""KV caches as vLLM makes them, in host memory: one allocation, six orders, a view per layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mooncake_hal.kv.geometry import head_range
from mooncake_vllm.vllm_memory import LINEAR, CacheView, ModelKV, RankPosition, view_caches

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Which axis of (layer, block, head, token, content) comes where in memory, outermost first."""


@dataclass(frozen=True, slots=True)
class Caches:
    """One rank's.

    Args:
        layers: each ``[blocks, heads, tokens, content]``, by vLLM's name.
        view: what the connector makes of them.
    """

    layers: dict[str, torch.Tensor]
    view: CacheView

    def stacked(self) -> NDArray[np.float32]:
        """All of them: ``[layers, blocks, heads, tokens, content]``; a copy."""
        return np.stack([layer.numpy() for layer in self.layers.values()])

    def fill(self, values: NDArray[np.float32]) -> None:
        """Write all of them, as ``stacked`` returns them."""
        for layer, content in zip(self.layers.values(), values, strict=True):
            layer.copy_(torch.from_numpy(content))


def make_caches(
    model: ModelKV,
    order: str,
    num_blocks: int,
    block_size: int,
    *,
    tp: tuple[int, int] = (0, 1),
    layers: range | None = None,
    num_pages: int | None = None,
    format: str = LINEAR,
) -> Caches:
    """A rank's KV caches, of zeros.

    Args:
        model: what a token's KV is.
        order: key of ``ORDERS``.
        num_blocks, block_size: of the kernels.
        tp: rank and size.
        layers: of the rank's stage; None: all.
        num_pages: blocks that the scheduler counts; None: as many.
        format: as ``view_caches`` takes it.
    """
    held = layers or range(model.layers)
    start, stop = head_range(model.kv_heads, tp[1], tp[0])
    shape = (len(held), num_blocks, stop - start, block_size, sum(model.plane_dims))
    physical = torch.zeros([shape[axis] for axis in ORDERS[order]], dtype=torch.float32)
    logical = physical.permute([ORDERS[order].index(axis) for axis in range(5)])
    named = {f"model.layers.{n}.self_attn.attn": logical[at] for at, n in enumerate(held)}
    position = RankPosition(*tp, "cpu")
    return Caches(named, view_caches(named, model, position, num_pages or num_blocks, format))
