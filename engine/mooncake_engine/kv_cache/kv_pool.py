"""The paged KV memory of one rank: one registered-able allocation, seen as strided tensors."""

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
"""Where KV is in memory that the host needs for others, too, and nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many blocks of how many tokens, how many more in host memory, and behind the blocks, how
    many that no request ever has."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    num_scratch_blocks: int = 0

    @property
    def num_blocks_in_all(self) -> int:
        """On the device."""
        return self.num_blocks + self.num_scratch_blocks


class KVPool:
    """All KV blocks of one rank.

    Args:
        backend: whose memory to take and whose layouts are possible.
        device: device index.
        geometry: the model's KV.
        shard: the part of it that this rank holds.
        size: blocks and tokens per block.
        layout_name: key of ``KV_LAYOUTS``.

    Raises:
        OutOfMemory: the device has less than ``layout_bytes``.
    """

    def __init__(  # what fixes a pool
        self,
        backend: Backend,
        device: int,
        geometry: KVGeometry,
        shard: KVShard,
        size: PoolSize,
        *,
        layout_name: str,
    ) -> None:
        self.geometry = geometry
        self.shard = shard
        self.num_blocks = size.num_blocks  # of requests; the layout has the scratch blocks, too
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
        """What a transport registers."""
        return self._allocation.region

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.planes[0][0].device

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.layout.block_size

    @property
    def layers(self) -> dict[int, tuple[Tensor, ...]]:
        """The planes of each held layer, by its number in the model."""
        first = self.shard.layer_start
        return {first + index: self.layer(index) for index in range(self.shard.layers)}

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """The planes of one held layer, each ``[num_blocks, block_size, heads, dim]``."""
        return tuple(plane[index] for plane in self.planes)

    def turn_rope(self, block_ids: Sequence[int], tokens: tuple[int, int], order: str) -> None:
        """Bring rope rows of latents into the other order: see ``backend_parts.turn_rope``."""
        from mooncake_hal.backend_parts import turn_rope

        turn_rope(self.planes[1], block_ids, tokens, order)

    def close(self) -> None:
        """Give the memory back; regions must have been withdrawn before. Idempotent."""
        self.planes = ()
        self._allocation.free()


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name, such as ``"bfloat16"``."""
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
    """The layout that the config names, or the best one that the backend runs on.

    Raises:
        ConfigError: the backend's kernels don't run on the layout asked for.
    """
    if config.kv_layout == "auto":
        return supported[0]
    if config.kv_layout not in supported:
        raise ConfigError(
            f"KV layout {config.kv_layout!r} was asked for, but this backend's kernels run on "
            f"{list(supported)}; choose one of them or 'auto'"
        )
    return config.kv_layout


def choose_num_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks per rank: the config's number, or what its memory for KV holds.

    Args:
        config: says how much.
        block_bytes: of one block, on the rank where it is largest.

    Raises:
        ConfigError: the memory allowed for KV holds not even one block.
    """
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks < 1:
            raise ConfigError(f"num_kv_blocks must be at least 1, got {config.num_kv_blocks}")
        return config.num_kv_blocks
    nbytes = DEFAULT_KV_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
    return blocks_in(nbytes, block_bytes)


def blocks_in(nbytes: int, block_bytes: int) -> int:
    """How many blocks that memory holds.

    Raises:
        ConfigError: not even one.
    """
    if nbytes < block_bytes:
        raise ConfigError(
            f"there are {nbytes} bytes for KV, but one block takes {block_bytes} bytes; raise "
            "kv_cache_bytes or lower block_size"
        )
    return nbytes // block_bytes
