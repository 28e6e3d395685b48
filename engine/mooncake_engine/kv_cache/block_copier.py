"""Copies and converts whole KV blocks on one rank, as step plans say: swaps and copies on write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory
from mooncake_hal.backend import CopyStream, Fence, Ops
from mooncake_hal.backend_parts import index_tensor, to_device
from mooncake_hal.latents import NativeLatentOps

if TYPE_CHECKING:
    from mooncake_engine.scheduling.step_plan import StepPlan


_CHUNK_BLOCKS = 64
"""Blocks per unit of work on the copy stream; a staging buffer holds that many of one layer."""


class BlockCopier:
    """Copies blocks of one rank, and owns the host memory that they are swapped out to. Used by the
    rank's model runner.

    Copies between device and host run on a stream of their own. A step waits only for the copies of
    blocks that it touches, which are queued before the others. Host memory is committed at once,
    so that a host without enough of it shows at start, unless the device is the CPU: there, when it
    is first written.

    Args:
        pool: the rank's KV cache.
        num_host_blocks: capacity of the host memory, in blocks.
        ops: ops that gather, scatter, copy and convert blocks.
        device: device of the pool.
        stream: stream for the copies between device and host; the copier closes it.
    """

    def __init__(
        self,
        pool: KVCacheMemory,
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
        self._in_flight: dict[int, Fence] = {}  # last copy of each block, which completes last

    @property
    def is_copying(self) -> bool:
        """Whether copies from or to the host are still in flight."""
        if self._in_flight and self._last.query():
            self.drain()
        return bool(self._in_flight)

    def copy(self, plan: StepPlan) -> None:
        """Convert received blocks, swap out, swap in, and copy on write, in this order, since each
        operation may reuse blocks of the one before. Returns when the plan's sequences may run;
        other copies to or from the host may still be in flight."""
        touched = plan.touched_blocks() if self._in_flight or plan.has_host_copies else set()
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
        """Wait for all copies. Re-raises the error of a copy that failed."""
        for fence in dict.fromkeys(self._in_flight.values()):
            fence.synchronize()
        self._in_flight.clear()

    def close(self) -> None:
        """Close the stream, after the copies in flight. Idempotent."""
        self._stream.close()

    def _start(
        self,
        copy: Callable[[Tensor, Tensor], None],
        pairs: Sequence[tuple[int, int]],
        device_side: int,
        touched: set[int],
    ) -> None:
        """Submit copies, those that the step waits for first.

        Args:
            copy: swaps blocks out or in.
            pairs: ``(source, target)`` blocks.
            device_side: index of the device's block in each pair, 0 or 1.
            touched: device blocks that the step touches.
        """
        first = [pair for pair in pairs if pair[device_side] in touched]
        others = [pair for pair in pairs if pair[device_side] not in touched]
        for part in (first, others):
            for start in range(0, len(part), _CHUNK_BLOCKS):
                chunk = part[start : start + _CHUNK_BLOCKS]
                self._last = self._stream.submit(partial(copy, *self._ids(chunk)))
                self._in_flight |= dict.fromkeys((pair[device_side] for pair in chunk), self._last)

    def _wait_for(self, blocks: set[int]) -> None:
        for block_id in blocks & self._in_flight.keys():
            self._in_flight.pop(block_id).synchronize()

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
        """Returns the sources and the targets as host tensors."""
        return torch.tensor(copies, dtype=torch.int64).unbind(dim=1)


def _host_planes(planes: list[Tensor], num_blocks: int, device: torch.device) -> list[Tensor]:
    """Allocates a contiguous host tensor per plane, ``[num_blocks, block_size, heads, dim]``."""
    sizes = [num_blocks * prod(plane.shape[1:]) for plane in planes]
    # Not page-locked: copies to and from the device go through staging tensors anyway, and torch's
    # allocator of page-locked memory rounds up to a power of two, up to twice the size.
    flat = torch.empty(sum(sizes), dtype=planes[0].dtype)
    if device.type != "cpu":
        flat.zero_()
    parts = torch.split(flat, sizes)
    return [
        part.view(num_blocks, *plane.shape[1:]) for part, plane in zip(parts, planes, strict=True)
    ]
