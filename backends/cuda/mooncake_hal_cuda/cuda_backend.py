"""The CUDA backend: assembles ops, memory, devices, graphs and NCCL collectives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from mooncake_hal.accelerator import AcceleratorRuntime
from mooncake_hal.backend import Capabilities, Communicator, DeviceInfo, Graph, GroupSpec
from mooncake_hal.collectives import (
    DeviceCommunicator,
    GroupCommunicator,
    GroupFactory,
    ProcessGroup,
)
from mooncake_hal.errors import BackendUnavailable, CapabilityError
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal_cuda import cuda_env
from mooncake_hal_cuda.attention_libraries import NAMES
from mooncake_hal_cuda.cuda_ops import CudaOps
from mooncake_hal_cuda.launch_tuning import Tuning, tuned_generation
from mooncake_hal_cuda.libcuda import CudaDriver
from mooncake_hal_cuda.memory.cuda_memory import CudaMemory
from mooncake_hal_cuda.memory.memory_kinds import DeviceSharing
from mooncake_hal_cuda.one_shot_all_reduce import IMPLEMENTATIONS, SmallAllReduce

logger = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float16", "float32")
BLOCK_SIZES = (16, 32, 64, 128, 8, 256, 4)
TRANSPORTS = ("cuda_ipc", "rdma", "staged")
ROUNDING = (("attention shares", "to the activations' type"),)
"""The kernels multiply attention probabilities and values on tensor cores, which take one type for
both operands."""


class CudaBackend:
    """The ``Backend`` of the GPUs that are visible to this process.

    Raises:
        BackendUnavailable: torch sees no GPU, or the first one is not supported by the kernels.
    """

    name = "cuda"

    def __init__(self) -> None:
        self.runtime = CudaRuntime()
        devices = self.runtime.devices()
        if not devices:
            raise BackendUnavailable(self.name, "torch sees no device; see CUDA_VISIBLE_DEVICES")
        tuning = _tune(devices[0])
        self.ops = CudaOps(tuning, cuda_env.attention(NAMES))
        self.capabilities = Capabilities(
            dtypes=DTYPES,
            block_sizes=BLOCK_SIZES,
            kv_layouts=tuple(KV_LAYOUTS),
            graphs=True,
            transports=TRANSPORTS,
            scheduler_resource="GPU",
            sampling=True,
            kv_dtypes=tuning.kv_dtypes,
            fused_rope_writes=True,
            rounding=ROUNDING,
            quantization=tuning.quantization,
        )
        sharing = DeviceSharing(CudaDriver())
        self.memory = CudaMemory(sharing, devices)
        self._groups = GroupFactory(
            partial(
                NcclCommunicator,
                sharing=sharing,
                implementation=cuda_env.all_reduce(IMPLEMENTATIONS),
            )
        )

    def communicator(self, group: GroupSpec) -> Communicator:
        return self._groups.join(group)


class OneShotCommunicator(GroupCommunicator):
    """A communicator that all-reduces small tensors over shared memory if all ranks can, and
    everything else over its library."""

    small: SmallAllReduce

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.small.reduce(self, x) else super().all_reduce(x)

    def close(self) -> None:
        self.small.close()
        super().close()


class NcclCommunicator(OneShotCommunicator, DeviceCommunicator):
    """One rank of an NCCL group.

    Args:
        group, generation: see ``GroupCommunicator``.
        sharing: the driver, and the memory kind of each device.
        implementation: how small all-reduces run, one of ``IMPLEMENTATIONS``.
    """

    def __init__(
        self, group: GroupSpec, generation: int, *, sharing: DeviceSharing, implementation: str
    ) -> None:
        super().__init__(group, generation, _join, name="nccl", accelerator=torch.cuda)
        self.small = SmallAllReduce(sharing, group.timeout_s, implementation)


def _join(store: Store, group: GroupSpec) -> ProcessGroup:
    nccl = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    return cast(ProcessGroup, nccl(store, group.rank, group.world_size, options))


class CudaGraph:
    """A captured graph; it owns the memory that its kernels use."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        self._graph.replay()  # the kernels read context lengths from device tensors


class CudaRuntime(AcceleratorRuntime):
    """The GPUs that CUDA_VISIBLE_DEVICES shows."""

    def __init__(self) -> None:
        devices = [_describe(index) for index in range(torch.cuda.device_count())]
        super().__init__("cuda", torch.cuda, "cuda", "CUDA_VISIBLE_DEVICES", devices)

    def capture(self, run: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        self.run_captured(
            run,
            lambda pool, stream: torch.cuda.graph(
                graph, pool, stream, capture_error_mode="thread_local"
            ),
        )
        captured = CudaGraph(graph)
        self.keep_in_pool(captured)
        return captured


def _tune(device: DeviceInfo) -> Tuning:
    """Launch parameters for a device.

    Raises:
        BackendUnavailable: the kernels don't support it.
    """
    try:
        generation = tuned_generation(device.generation)
    except CapabilityError as exc:
        raise BackendUnavailable(
            "cuda",
            f"the first device, {device.name}, can't be used: {exc}. If there are others, name "
            "them in CUDA_VISIBLE_DEVICES",
        ) from exc
    if generation != device.generation:
        logger.warning("%s gets the launch parameters of %s", device.generation, generation)
    processors = torch.cuda.get_device_properties(device.index).multi_processor_count
    return Tuning(generation, processors)


def _describe(index: int) -> DeviceInfo:
    found = torch.cuda.get_device_properties(index)
    return DeviceInfo(index, found.name, f"sm_{found.major}{found.minor}", found.total_memory)
