"""Moves and turns whole KV blocks as plans say: to host memory, back from there, on write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.kv_cache.kv_pool import KVPool
from mooncake_hal.backend import CopyStream, Fence, Ops
from mooncake_hal.backend_parts import index_tensor, to_device
from mooncake_hal.latents import NativeLatentOps

if TYPE_CHECKING:
    from mooncake_engine.scheduling.step_plan import StepPlan


_CHUNK_BLOCKS = 64
"""Blocks per piece of work on the copy stream, which takes memory for so many of one layer."""


class BlockCopier:
    """One rank's copies of blocks, and the host memory that they are swapped out to.

    Copies between device and host run on a stream of their own: a step waits for those alone whose
    blocks it touches, and of these they are the first. Host memory is page-locked where the device
    is not the host itself; a CPU takes its pages when they are first written.

    Args:
        pool: the rank's KV.
        num_host_blocks: how many blocks host memory has room for.
        ops: pack and unpack blocks.
        device: of the pool.
        stream: for the copies; the copier closes it.
    """

    def __init__(
        self,
        pool: KVPool,
        num_host_blocks: int,
        ops: Ops,
        device: torch.device,
        stream: CopyStream,
    ) -> None:
        self._ops = ops
        self._device = device
        self._stream = stream
        self._planes = [plane for i in range(pool.shard.layers) for plane in pool.layer(i)]
        self._host = _host_planes(self._planes, num_host_blocks, device)
        self._under_way: dict[int, Fence] = {}  # by block; later copies of a block end later

    @property
    def is_copying(self) -> bool:
        """Whether copies from or to the host are still under way."""
        if self._under_way and self._last.query():
            self.drain()
        return bool(self._under_way)

    def copy(self, plan: StepPlan) -> None:
        """Turn what peers have written, swap out, swap in, copy on write: in this order, since each
        may reuse the last one's blocks. Returns when the plan's sequences may run, and what is
        copied to or from the host otherwise is under way."""
        touched = plan.touched_blocks() if self._under_way or plan.has_host_copies else set()
        self._wait_for(touched)
        if plan.received_blocks:
            self._convert_rows(index_tensor(self._device, plan.received_blocks))
        self._start(self._swap_out, plan.swap_outs, 0, touched)
        self._start(self._swap_in, plan.swap_ins, 1, touched)
        self._wait_for(touched)
        if plan.block_copies:
            pairs = np.array(plan.block_copies, dtype=np.int64)
            source, target = to_device(self._device, [pairs[:, 0].copy(), pairs[:, 1].copy()])
            for plane in self._planes:
                self._ops.copy_blocks(plane, source, target)
        if plan.drains_copies:
            self.drain()

    def drain(self) -> None:
        """Wait for all copies; raises what a copy raised."""
        for fence in dict.fromkeys(self._under_way.values()):
            fence.synchronize()
        self._under_way.clear()

    def close(self) -> None:
        """End the copies; what is under way is finished. Idempotent."""
        self._stream.close()

    def _start(
        self,
        copy: Callable[[Tensor, Tensor], None],
        pairs: Sequence[tuple[int, int]],
        device_side: int,
        touched: set[int],
    ) -> None:
        """Begin copies of ``(source, target)`` blocks, of which ``device_side`` is on the device,
        with those that the step waits for first."""
        first = [pair for pair in pairs if pair[device_side] in touched]
        others = [pair for pair in pairs if pair[device_side] not in touched]
        for part in (first, others):
            for start in range(0, len(part), _CHUNK_BLOCKS):
                chunk = part[start : start + _CHUNK_BLOCKS]
                self._last = self._stream.submit(partial(copy, *self._ids(chunk)))
                self._under_way |= dict.fromkeys((pair[device_side] for pair in chunk), self._last)

    def _wait_for(self, blocks: set[int]) -> None:
        for block_id in blocks & self._under_way.keys():
            self._under_way.pop(block_id).synchronize()

    def _convert_rows(self, block_ids: Tensor) -> None:
        ops = cast(NativeLatentOps, self._ops)
        for plane in self._planes:
            ops.convert_latents(plane, block_ids)

    @torch.inference_mode()
    def _swap_out(self, block_ids: Tensor, host_block_ids: Tensor) -> None:
        on_device = block_ids.to(self._device)
        for plane, host in zip(self._planes, self._host, strict=True):
            staging = plane.new_empty((len(on_device), *plane.shape[1:]))
            self._ops.gather_blocks(plane, on_device, staging)
            host[host_block_ids] = staging.cpu()

    @torch.inference_mode()
    def _swap_in(self, host_block_ids: Tensor, block_ids: Tensor) -> None:
        on_device = block_ids.to(self._device)
        for plane, host in zip(self._planes, self._host, strict=True):
            staging = host[host_block_ids].to(self._device)
            self._ops.scatter_blocks(staging, plane, on_device)

    @staticmethod
    def _ids(copies: Iterable[tuple[int, int]]) -> tuple[Tensor, ...]:
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
