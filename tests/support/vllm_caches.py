"""KV caches as vLLM allocates them, in host memory: an allocation, six orders, layer views."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mooncake_hal.kv.geometry import head_range
from mooncake_hal.kv.transfer_plan import BlockTransfer, KVShardSpec, plan_transfer
from mooncake_vllm.ascend_memory import view_ascend_caches
from mooncake_vllm.vllm_memory import LINEAR, CacheView, ModelKV, RankPosition, view_caches

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Order of the axes (layer, block, head, token, content) in memory, outermost first."""


@dataclass(frozen=True, slots=True)
class Caches:
    """One rank's KV caches.

    Args:
        layers: each ``[blocks, heads, tokens, content]``, by vLLM's name.
        view: the connector's view of them.
    """

    layers: dict[str, torch.Tensor]
    view: CacheView

    def stacked(self) -> NDArray[np.float32]:
        """A copy of all caches: ``[layers, blocks, heads, tokens, content]``."""
        return np.stack([layer.numpy() for layer in self.layers.values()])

    def fill(self, values: NDArray[np.float32]) -> None:
        """Overwrite all caches with values in the form that ``stacked`` returns."""
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
    """A rank's KV caches, filled with zeros. With KV-cache groups, the first layers of all groups
    share one tensor, the second layers the next, and so on.

    Args:
        model: the shape of a token's KV.
        order: key of ``ORDERS``.
        num_blocks, block_size: as the kernels count.
        tp: rank and size.
        layers: of the rank's stage; None: all.
        num_pages: number of blocks as the scheduler counts; None: ``num_blocks``.
        format: see ``view_caches``.
    """
    held = layers or range(model.layers)
    start, stop = head_range(model.kv_heads, tp[1], tp[0])
    slots = {layer: at for group in model.groups for at, layer in enumerate(group.layers)}
    at = [slots.get(layer, index) for index, layer in enumerate(held)]
    shape = (max(at) + 1, num_blocks, stop - start, block_size, sum(model.plane_dims))
    physical = torch.zeros([shape[axis] for axis in ORDERS[order]], dtype=torch.float32)
    logical = physical.permute([ORDERS[order].index(axis) for axis in range(5)])
    named = {
        f"model.layers.{n}.self_attn.attn": logical[slot] for slot, n in zip(at, held, strict=True)
    }
    position = RankPosition(*tp, "cpu")
    return Caches(named, view_caches(named, model, position, num_pages or num_blocks, format))


def filled_ranks(
    model: ModelKV, order: str, tp_size: int, *, seed: int = 0, format: str = LINEAR
) -> list[Caches]:
    """An instance's KV caches, rank by rank: 8 blocks of 4 tokens each, filled with noise."""
    ranks = [
        make_caches(model, order, 8, 4, tp=(rank, tp_size), format=format)
        for rank in range(tp_size)
    ]
    random = np.random.default_rng(seed)
    for rank in ranks:
        rank.fill(random.random(rank.stacked().shape, dtype=np.float32))
    return ranks


@dataclass(frozen=True, slots=True)
class AscendCaches:
    """KV caches as vLLM-Ascend allocates them, with separate K and V.

    Args:
        layers: each a tuple, by vLLM's name.
        view: the connector's view of them.
        heads_first: whether the heads' axis comes before the tokens'.
    """

    layers: dict[str, tuple[torch.Tensor, ...]]
    view: CacheView
    heads_first: bool

    def stacked(self) -> NDArray[np.float32]:
        """A copy of all caches: ``[layers, blocks, heads, tokens, content]``."""
        axes = (0, 1, 2, 3) if self.heads_first else (0, 2, 1, 3)
        return np.stack(
            [
                np.concatenate([plane.permute(axes).numpy() for plane in layer], axis=-1)
                for layer in self.layers.values()
            ]
        )


def make_ascend_caches(
    model: ModelKV,
    num_blocks: int,
    block_size: int,
    *,
    tp: tuple[int, int] = (0, 1),
    heads_first: bool = False,
    is_shared: bool = False,
) -> AscendCaches:
    """A rank's KV caches, filled with noise.

    Args:
        model, num_blocks, block_size, tp: see ``make_caches``.
        heads_first: whether the heads' axis comes before the tokens'.
        is_shared: whether a layer's K and V alternate, block by block, in one allocation.
    """
    start, stop = head_range(model.kv_heads, tp[1], tp[0])
    middle = (stop - start, block_size) if heads_first else (block_size, stop - start)
    named: dict[str, tuple[torch.Tensor, ...]] = {}
    for number in range(model.layers):
        if is_shared:
            both = torch.rand(num_blocks, len(model.plane_dims), *middle, model.plane_dims[0])
            planes = tuple(both[:, plane] for plane in range(len(model.plane_dims)))
        else:
            planes = tuple(torch.rand(num_blocks, *middle, dim) for dim in model.plane_dims)
        named[f"model.layers.{number}.self_attn.attn"] = planes
    position = RankPosition(*tp, "cpu")
    view = view_ascend_caches(named, model, position, num_blocks, heads_first=heads_first)
    return AscendCaches(named, view, heads_first)


class RankCaches(Protocol):
    """A rank's memory, of either kind."""

    @property
    def view(self) -> CacheView:
        """The connector's view of it."""
        ...

    def stacked(self) -> NDArray[np.float32]:
        """A copy of all caches: ``[layers, blocks, heads, tokens, content]``."""
        ...


def copy_prompt(
    targets: Sequence[RankCaches], sources: Sequence[RankCaches], movement: BlockTransfer
) -> None:
    """Copy the KV that every target needs from the sources, by transfer plans and memmove."""
    shards = [KVShardSpec(source.view.shard, source.view.layout) for source in sources]
    for target in targets:
        place = KVShardSpec(target.view.shard, target.view.layout)
        for plan in plan_transfer(target.view.geometry, place, shards, movement):
            columns = (plan.spans.local, plan.spans.remote, plan.spans.nbytes)
            for local, remote, nbytes in zip(*(c.tolist() for c in columns), strict=True):
                ctypes.memmove(local, remote, nbytes)


def whole_prompt(ranks: Sequence[RankCaches], blocks: list[int]) -> Any:
    """The KV of a prompt, from all ranks: ``[layers, heads, tokens, content]``."""
    size = ranks[0].view.layout.block_size
    heads = [rank.stacked()[:, blocks] for rank in ranks]  # [layers, blocks, heads, tokens, c]
    joined = np.concatenate(heads, axis=2).swapaxes(1, 2)
    layers, num_heads, num_blocks, _, content = joined.shape
    return joined.reshape(layers, num_heads, num_blocks * size, content)
