"""The CUDA backend: its parts put together."""

from __future__ import annotations

import torch

from mooncake_hal.backend import Capabilities, Communicator, GroupSpec
from mooncake_hal.collectives import GroupFactory
from mooncake_hal.errors import BackendUnavailable, CapabilityError
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal_cuda import env
from mooncake_hal_cuda.choosing import NAMES
from mooncake_hal_cuda.communicator import NcclCommunicator
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.memory import CudaMemory
from mooncake_hal_cuda.ops import CudaOps
from mooncake_hal_cuda.runtime import CudaRuntime
from mooncake_hal_cuda.sharing.devices import DeviceSharing
from mooncake_hal_cuda.tuning import Tuning

DTYPES = ("bfloat16", "float16", "float32")
BLOCK_SIZES = (16, 32, 64, 128, 8, 256, 4)
TRANSPORTS = ("cuda_ipc", "rdma", "staged")


class CudaBackend:
    """Everything about the GPUs that this process sees.

    Raises:
        BackendUnavailable: torch sees none, or one that is too old.
    """

    name = "cuda"

    def __init__(self) -> None:
        self.runtime = CudaRuntime()
        devices = self.runtime.devices()
        if not devices:
            raise BackendUnavailable(self.name, "torch sees no device; see CUDA_VISIBLE_DEVICES")
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        try:
            tuning = Tuning(devices[0].generation, processors)
        except CapabilityError as exc:
            raise BackendUnavailable(self.name, str(exc)) from exc
        self.ops = CudaOps(tuning, env.attention(NAMES))
        self.capabilities = Capabilities(
            dtypes=DTYPES,
            block_sizes=BLOCK_SIZES,
            kv_layouts=tuple(KV_LAYOUTS),
            graphs=True,
            transports=TRANSPORTS,
            scheduler_resource="GPU",
            sampling=True,
            kv_dtypes=tuning.kv_dtypes,
        )
        self.memory = CudaMemory(DeviceSharing(CudaDriver()), devices)
        self._groups = GroupFactory(NcclCommunicator)

    def communicator(self, group: GroupSpec) -> Communicator:
        """See ``Backend``."""
        return self._groups.join(group)
