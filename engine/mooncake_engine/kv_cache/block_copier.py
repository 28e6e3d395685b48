"""Moves and turns whole KV blocks as plans say: to host memory, back from there, on write."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mooncake_engine.kv_cache.kv_pool import KVPool
from mooncake_hal.backend import Ops
from mooncake_hal.latents import NativeLatentOps

if TYPE_CHECKING:
    from mooncake_engine.scheduling.step_plan import StepPlan


class BlockCopier:
    """One rank's copies of blocks, and the host memory that they are swapped out to.

    Host memory is page-locked where the device is not the host itself; a CPU takes its pages when
    they are first written.

    Args:
        pool: the rank's KV.
        num_host_blocks: how many blocks host memory has room for.
        ops: pack and unpack blocks.
        device: of the pool.
    """

    def __init__(self, pool: KVPool, num_host_blocks: int, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._device = device
        self._planes = [plane for i in range(pool.shard.layers) for plane in pool.layer(i)]
        self._host = _host_planes(self._planes, num_host_blocks, device)

    def copy(self, plan: StepPlan) -> None:
        """Turn what peers have written, swap out, swap in, copy on write: in this order, since each
        may reuse the last one's blocks."""
        if plan.received_blocks:
            self._make_resident(torch.tensor(plan.received_blocks).to(self._device))
        if plan.swap_outs:
            self._swap_out(*self._ids(plan.swap_outs))
        if plan.swap_ins:
            self._swap_in(*self._ids(plan.swap_ins))
        if plan.block_copies:
            source, target = (ids.to(self._device) for ids in self._ids(plan.block_copies))
            for plane in self._planes:
                self._ops.copy_blocks(plane, source, target)

    def _make_resident(self, block_ids: Tensor) -> None:
        ops = cast(NativeLatentOps, self._ops)
        for plane in self._planes:
            ops.convert_latents(plane, block_ids)

    def _swap_out(self, block_ids: Tensor, host_block_ids: Tensor) -> None:
        on_device = block_ids.to(self._device)
        for plane, host in zip(self._planes, self._host, strict=True):
            staging = plane.new_empty((len(on_device), *plane.shape[1:]))
            self._ops.gather_blocks(plane, on_device, staging)
            host[host_block_ids] = staging.cpu()

    def _swap_in(self, host_block_ids: Tensor, block_ids: Tensor) -> None:
        on_device = block_ids.to(self._device)
        for plane, host in zip(self._planes, self._host, strict=True):
            staging = host[host_block_ids].to(self._device)
            self._ops.scatter_blocks(staging, plane, on_device)

    def _ids(self, copies: Iterable[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Sources and targets, on the host."""
        return torch.tensor(copies, dtype=torch.int64).unbind(dim=1)


def _host_planes(planes: list[Tensor], num_blocks: int, device: torch.device) -> list[Tensor]:
    """A contiguous tensor per plane: ``[num_blocks, block_size, heads, dim]``."""
    sizes = [num_blocks * prod(plane.shape[1:]) for plane in planes]
    is_pinned = device.type != "cpu" and num_blocks > 0
    flat = torch.empty(sum(sizes), dtype=planes[0].dtype, pin_memory=is_pinned)
    parts = torch.split(flat, sizes)
    return [
        part.view(num_blocks, *plane.shape[1:]) for part, plane in zip(parts, planes, strict=True)
    ]
