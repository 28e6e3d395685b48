"""The null backend: results have the right shapes, but nothing is computed.

Attention and linear layers return zeros, and the other ops return their input. So the logits of any
model are zeros, whatever its batch, at the cost of allocating them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mooncake_hal.backend import (
    AttentionBatch,
    Capabilities,
    Communicator,
    DeviceInfo,
    Graph,
    GroupSpec,
    MemoryInfo,
)
from mooncake_hal.backend_parts import (
    SingleRankCommunicator,
    SynchronousRuntime,
    TensorAllocation,
    require_device,
)
from mooncake_hal.errors import CapabilityError, DeviceError, OutOfMemory
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.latents import LatentRows
from mooncake_hal.transport import MemoryRegion

TOTAL_BYTES = 1 << 30
"""Memory size that the null device reports, in bytes."""


class NullRuntime(SynchronousRuntime):
    """The runtime of a single device that never has work."""

    def __init__(self) -> None:
        super().__init__("null")

    def devices(self) -> Sequence[DeviceInfo]:
        return (DeviceInfo(0, "null", "null", TOTAL_BYTES),)

    def memory_info(self, index: int) -> MemoryInfo:
        self.require_device(index)
        return MemoryInfo(TOTAL_BYTES, TOTAL_BYTES)

    def reset_peak(self, index: int) -> None:
        self.require_device(index)

    def peak_bytes(self, index: int) -> int:
        self.require_device(index)
        return 0

    def capture(self, run: Callable[[], None]) -> Graph:
        raise CapabilityError("the null backend has no graphs; run without graph capture")


class NullOps:
    """Ops that return tensors of the right shape and compute nothing."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Store nothing."""

    def decode_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """Zeros."""
        return torch.zeros_like(query)

    def prefill_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """Zeros."""
        return torch.zeros_like(query)

    def pack_rope(self, rows: Tensor) -> Tensor:
        """The input."""
        return rows

    def write_latents(
        self,
        query: Tensor,
        rows: LatentRows,
        latent_cache: Tensor,
        rope_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """The queries; store nothing."""
        return query

    def mla_decode_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """Zeros."""
        return query.new_zeros(*query.shape[:2], latent_cache.shape[-1])

    def mla_prefill_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """Zeros."""
        return query.new_zeros(*query.shape[:2], latent_cache.shape[-1])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The input."""
        return x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The residual, twice."""
        return residual, residual

    def rope(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The inputs."""
        return query, key

    def pack_weight(self, weight: Tensor) -> Tensor:
        """The input."""
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Zeros."""
        return x.new_zeros(x.shape[0], weight.shape[0])

    def silu_mul(self, x: Tensor) -> Tensor:
        """The first half."""
        return x[..., : x.shape[-1] // 2]

    def pack_experts(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The input."""
        return (weights,)

    def unpack_experts(self, packed: tuple[Tensor, ...]) -> Tensor:
        """The input."""
        return packed[0]

    def moe(
        self,
        x: Tensor,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> Tensor:
        """Zeros."""
        return torch.zeros_like(x)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy nothing."""

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
        """Copy nothing."""

    def scatter_blocks(self, staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
        """Copy nothing."""


class NullMemory:
    """Allocates host memory, up to TOTAL_BYTES per allocation."""

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        require_device("null", index)
        if nbytes <= 0:
            raise DeviceError(f"an allocation needs at least one byte, {nbytes} were requested")
        if nbytes > TOTAL_BYTES:
            raise OutOfMemory(
                f"{nbytes} bytes were requested, {TOTAL_BYTES} of {TOTAL_BYTES} bytes are free"
            )
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        return TensorAllocation(MemoryRegion(tensor.data_ptr(), nbytes), tensor)


class NullBackend:
    """A complete backend that computes nothing."""

    name = "null"

    def __init__(self) -> None:
        self.capabilities = Capabilities(
            dtypes=("bfloat16", "float32"),
            block_sizes=(16, 32, 64, 128),
            kv_layouts=tuple(KV_LAYOUTS),
            graphs=False,
            transports=("tcp", "shm"),
        )
        self.runtime = NullRuntime()
        self.ops = NullOps()
        self.memory = NullMemory()

    def communicator(self, group: GroupSpec) -> Communicator:
        """Raises CapabilityError for more than one rank."""
        if group.world_size != 1:
            raise CapabilityError(
                f"the null backend runs on one rank, {group.world_size} were requested"
            )
        return SingleRankCommunicator()
