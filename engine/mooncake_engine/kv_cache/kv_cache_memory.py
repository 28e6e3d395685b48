"""The paged KV memory of one rank: one allocation that transports can register, seen as strided
tensors; and the choice of its layout and size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_hal.backend import Backend
from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.layout import KVLayout, layout_bytes, make_layout
from mooncake_hal.transport import MemoryRegion

if TYPE_CHECKING:
    import torch
    from torch import Tensor


DEFAULT_KV_BYTES = 1 << 30
"""Default size of the KV cache, in bytes, on devices that share their memory with the host."""


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """The size of a KV cache, in blocks.

    Args:
        num_blocks: blocks for requests, on the device.
        block_size: tokens per block.
        num_host_blocks: blocks in host memory, for swapping.
        num_scratch_blocks: blocks behind those for requests that no request ever owns.
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    num_scratch_blocks: int = 0

    @property
    def num_blocks_in_all(self) -> int:
        """Blocks on the device, scratch blocks included."""
        return self.num_blocks + self.num_scratch_blocks


class KVCacheMemory:
    """All KV blocks of one rank; owned by its worker.

    Args:
        backend: backend that allocates the memory.
        device: device index.
        geometry: KV geometry of the model.
        shard: part of it that this rank holds.
        size: number and size of the blocks.
        layout_name: key of ``KV_LAYOUTS``.

    Raises:
        OutOfMemory: the device has fewer than ``layout_bytes`` bytes free.
    """

    def __init__(  # what fixes a pool
        self,
        backend: Backend,
        device: int,
        geometry: KVGeometry,
        shard: KVShard,
        size: KVCacheSize,
        *,
        layout_name: str,
    ) -> None:
        self.geometry = geometry
        self.shard = shard
        self.num_blocks = size.num_blocks  # for requests; the layout has the scratch blocks, too
        num_blocks = size.num_blocks_in_all
        relative = make_layout(layout_name, geometry, shard, num_blocks, size.block_size)
        nbytes = layout_bytes(geometry, shard, num_blocks, size.block_size)
        self._allocation = backend.memory.allocate(nbytes, device)
        self.layout: KVLayout = relative.shifted(self._allocation.region.address)
        elements = self._allocation.tensor[:nbytes].view(torch_dtype(geometry.dtype))
        self.planes: tuple[tuple[Tensor, ...], ...] = tuple(
            _plane_views(elements, relative, geometry, shard, plane)
            for plane in range(geometry.planes)
        )

    @property
    def region(self) -> MemoryRegion:
        """The memory region that transports register."""
        return self._allocation.region

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.planes[0][0].device

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.layout.block_size

    @property
    def layers(self) -> dict[int, tuple[Tensor, ...]]:
        """The planes of each layer that the rank holds, by the layer's number in the model."""
        first = self.shard.layer_start
        return {first + index: self.layer(index) for index in range(self.shard.layers)}

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """Returns the planes of a layer, by its index among those that the rank holds; each is
        ``[num_blocks, block_size, heads, dim]``."""
        return tuple(plane[index] for plane in self.planes)

    def convert_rope_order(
        self, block_ids: Sequence[int], tokens: tuple[int, int], order: str
    ) -> None:
        """Reorder the rope rows of latents: see ``backend_parts.convert_rope_order``."""
        from mooncake_hal.backend_parts import convert_rope_order

        convert_rope_order(self.planes[1], block_ids, tokens, order)

    def close(self) -> None:
        """Free the memory; its regions must have been deregistered before. Idempotent."""
        self.planes = ()
        self._allocation.free()


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of that name, such as ``"bfloat16"``."""
    import torch

    return getattr(torch, name)  # type: ignore[no-any-return]  # torch names its dtypes so


def _plane_views(
    elements: Tensor, relative: KVLayout, geometry: KVGeometry, shard: KVShard, plane: int
) -> tuple[Tensor, ...]:
    unit = geometry.element_bytes
    shape = (relative.num_blocks, relative.block_size, shard.heads, geometry.plane_dims[plane])
    strides = (
        relative.block_strides[plane] // unit,
        relative.token_strides[plane] // unit,
        relative.head_strides[plane] // unit,
        1,
    )
    first = elements.storage_offset()  # an aligned allocation may begin inside a larger one
    return tuple(
        elements.as_strided(shape, strides, first + base // unit) for base in relative.bases[plane]
    )


def choose_layout(config: EngineConfig, supported: tuple[str, ...]) -> str:
    """Returns the configured layout; for ``auto``, the one that the backend prefers.

    Args:
        config: the engine's config.
        supported: layouts that the backend's kernels support, the preferred one first.

    Raises:
        ConfigError: the backend's kernels don't support the configured layout.
    """
    if config.kv_layout == "auto":
        return supported[0]
    if config.kv_layout not in supported:
        raise ConfigError(
            f"KV layout {config.kv_layout!r} was asked for, but this backend's kernels support "
            f"{list(supported)}; choose one of them or 'auto'"
        )
    return config.kv_layout


def choose_num_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Returns the number of blocks per rank: as configured, or as many as fit into the configured
    memory for KV.

    Args:
        config: the engine's config.
        block_bytes: bytes of one block, on the rank where it is largest.

    Raises:
        ConfigError: the configured number is below 1, or the memory is smaller than one block.
    """
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < 1:
            raise ConfigError(f"num_kv_blocks must be at least 1, got {config.num_kv_blocks}")
        return config.num_kv_blocks
    nbytes = DEFAULT_KV_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
    return blocks_in(nbytes, block_bytes)


def blocks_in(nbytes: int, block_bytes: int) -> int:
    """Returns how many blocks fit into ``nbytes`` bytes.

    Raises:
        ConfigError: not even one block fits.
    """
    if nbytes < block_bytes:
        raise ConfigError(
            f"{nbytes} bytes are available for KV, but one block takes {block_bytes} bytes; raise "
            "kv_cache_bytes or lower block_size"
        )
    return nbytes // block_bytes
