"""The Ascend backend: assembles runtime, ops, KV memory and HCCL collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol, cast
from weakref import WeakValueDictionary

import torch
import torch_npu
from torch import Tensor
from torch._C._distributed_c10d import Store

from mooncake_hal.backend import Capabilities, Communicator, GroupSpec
from mooncake_hal.backend_parts import TensorAllocation
from mooncake_hal.collectives import DeviceCommunicator, GroupFactory, ProcessGroup
from mooncake_hal.errors import BackendUnavailable, DeviceError, OutOfMemory
from mooncake_hal.fused_experts import ExpertShape
from mooncake_hal.transport import MemoryRegion
from mooncake_hal_ascend import ascend_env
from mooncake_hal_ascend.ascend_experts import (
    AscendFusedExperts,
    max_fused_tokens,
)
from mooncake_hal_ascend.ascend_ops import AscendOps
from mooncake_hal_ascend.ascend_runtime import AscendRuntime, npu

DTYPES = ("bfloat16", "float16")
"""The attention ops support no other types."""
KV_LAYOUTS = ("LPBTH",)
"""The ops require K and V as separate tensors: ``[blocks, tokens, heads, dim]``."""
TRANSPORTS = ("hccs", "staged")
ROUNDING = (
    ("attention shares", "to the activations' type"),
    ("sines of latent attention", "to the activations' type"),
)
"""The fused attention multiplies attention probabilities on the cube unit, and the fused write
accepts cosines and sines in the activations' type only."""

MAX_GRAPHS = 600
"""A graph occupies one of the device's 2,048 streams, and two more if it contains collectives
(vLLM-Ascend issue 1168). Newer releases of CANN allow more."""


class AscendBackend:
    """The ``Backend`` of the NPUs that are visible to this process.

    Raises:
        BackendUnavailable: torch-npu sees no NPU, or one of an unsupported family.
    """

    name = "ascend"

    def __init__(self) -> None:
        self.runtime = AscendRuntime()
        devices = self.runtime.devices()
        if not devices:
            raise BackendUnavailable(
                self.name, "torch-npu sees no device; see ASCEND_RT_VISIBLE_DEVICES"
            )
        soc = self.runtime.soc
        self.capabilities = Capabilities(
            dtypes=DTYPES,
            block_sizes=(soc.block_size,),
            kv_layouts=KV_LAYOUTS,
            graphs=True,
            max_graphs=MAX_GRAPHS,
            transports=TRANSPORTS,
            scheduler_resource="NPU",
            latent_dims=soc.latent_dims,
            native_latents=True,
            fused_experts=True,
            rounding=ROUNDING,
        )
        self.ops = AscendOps(soc)
        self._expert_limits = soc.fused_experts
        self.memory = AscendMemory(self.runtime, soc.transfer_alignment)
        self._groups = GroupFactory(HcclCommunicator)

    def communicator(self, group: GroupSpec) -> Communicator:
        return self._groups.join(group)

    def fused_experts(self, group: GroupSpec, shape: ExpertShape) -> AscendFusedExperts | None:
        limits = self._expert_limits
        most = max_fused_tokens(limits, group.world_size, shape, ascend_env.group_buffer_bytes())
        if not most:
            return None
        joined = self._groups.join(group)
        assert isinstance(joined, HcclCommunicator), "the ops take no group of one rank"
        return AscendFusedExperts(joined, joined.hccl_name, shape, most, limits.has_expert_scales)


class HcclCommunicator(DeviceCommunicator):
    """One rank of an HCCL group."""

    def __init__(self, group: GroupSpec, generation: int) -> None:
        super().__init__(group, generation, _join, name="hccl", accelerator=npu)

    @property
    def hccl_name(self) -> str:
        """The group's name for ops that contain collectives."""
        joined = cast(HcclProcessGroup, self._joined[0])
        return joined.get_hccl_comm_name(self.rank)


class HcclProcessGroup(ProcessGroup, Protocol):
    """A process group of HCCL."""

    def get_hccl_comm_name(self, rank: int) -> str:
        """The name of this rank's communicator, which is created if necessary."""
        ...


def _join(store: Store, group: GroupSpec) -> ProcessGroup:
    hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    options = hccl.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    return cast(ProcessGroup, hccl(store, group.rank, group.world_size, options))


class AscendMemory:
    """Allocator of KV memory from torch-npu, aligned as the transfer engines require.

    Args:
        runtime: runtime of the devices.
        alignment: alignment of allocations, in bytes.
    """

    def __init__(self, runtime: AscendRuntime, alignment: int) -> None:
        self._runtime = runtime
        self._alignment = alignment
        self._allocations: WeakValueDictionary[int, TensorAllocation] = WeakValueDictionary()

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        device = self._runtime.device(index)
        if nbytes <= 0:
            raise DeviceError(f"an allocation needs at least one byte, {nbytes} were asked for")
        info = self._runtime.memory_info(index)
        try:
            # torch-npu's allocator aligns to 512 bytes
            raw = torch.zeros(nbytes + self._alignment, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as exc:
            raise OutOfMemory(
                f"{nbytes} bytes were asked for, {info.free_bytes} of {info.total_bytes} bytes are "
                f"free on npu:{index}; use fewer KV blocks or free memory of this device"
            ) from exc
        skipped = -raw.data_ptr() % self._alignment
        tensor = raw[skipped : skipped + nbytes]
        self._runtime.synchronize(index)  # other streams and peers may use the memory from now on
        region = MemoryRegion(tensor.data_ptr(), nbytes, f"npu:{index}")
        made = TensorAllocation(region, tensor, npu.empty_cache)
        self._allocations[region.address] = made
        return made

    def allocation_around(self, address: int) -> Tensor | None:
        """The whole allocation that contains an address, or None."""
        for begin, made in list(self._allocations.items()):
            if begin <= address < begin + made.region.nbytes and not made.is_freed:
                return made.tensor
        return None

    def tensor_at(self, address: int) -> Tensor | None:
        """The whole allocation that begins at an address, or None."""
        found = self._allocations.get(address)
        return None if found is None or found.is_freed else found.tensor
