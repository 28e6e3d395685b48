"""The CUDA backend on an emulated device: the driver's calls act on host memory, and kernels run in
Triton's interpreter. Streams, events and graphs of torch.cuda are not emulated."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from support.triton_interpreter import repair

from mooncake_hal.backend import DeviceInfo, GroupSpec
from mooncake_hal.collectives import GroupFactory
from mooncake_hal.host_copies import Addresses
from mooncake_hal.native import compile_c
from mooncake_hal.session.addressing import host_identity
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.staged.staged_transport import InnerTransport, StagedTransport
from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp
from mooncake_hal_cpu.cpu_backend import CpuBackend, GlooCommunicator
from mooncake_hal_cpu.cpu_device import CpuRuntime
from mooncake_hal_cuda.cuda_backend import ROUNDING, TRANSPORTS, OneShotCommunicator
from mooncake_hal_cuda.cuda_ops import CudaOps
from mooncake_hal_cuda.kernels import gemv
from mooncake_hal_cuda.launch_tuning import Tuning
from mooncake_hal_cuda.libcuda import CudaDriver
from mooncake_hal_cuda.memory.cuda_memory import CudaMemory
from mooncake_hal_cuda.memory.memory_kinds import DeviceSharing
from mooncake_hal_cuda.memory.nvlink_domain import NvlinkFabric
from mooncake_hal_cuda.one_shot_all_reduce import SmallAllReduce
from mooncake_hal_cuda.transports import ipc_protocol
from mooncake_hal_cuda.transports.cuda_host_copies import CudaHostCopies
from mooncake_hal_cuda.transports.cuda_ipc import IpcTransport
from mooncake_hal_cuda.transports.device_copier import DeviceCopier

DTYPES = ("bfloat16", "float16", "float32")
DEVICE = DeviceInfo(0, "emulated", "sm_90", 4 << 30)
INTERPRETED_PIECES = 256
INTERPRETED_BYTES = 1 << 20
INTERPRETED_COLUMNS = 256
"""Columns of a single-row linear layer per program: each takes the interpreter 1 ms."""


class EmulatedRuntime(CpuRuntime):
    """One device, which computes on the host."""

    def devices(self) -> Sequence[DeviceInfo]:
        return (DEVICE,)


class EmulatedCommunicator(OneShotCommunicator, GlooCommunicator):
    """The GPUs' communicator, with gloo for NCCL; ranks are processes that share device memory."""

    def __init__(self, group: GroupSpec, generation: int, timeout_s: float | None = None) -> None:
        super().__init__(group, generation)
        self.small = SmallAllReduce(emulated_sharing(), timeout_s or group.timeout_s)

    @property
    def waited_s(self) -> Mapping[str, float]:
        return {}


class EmulatedBackend(CpuBackend):
    """A CPU backend with the name of the backend that it emulates."""

    name = "cuda"


def emulated_backend(processors: int = 132) -> EmulatedBackend:
    """A CPU backend with the CUDA backend's ops and memory, launched as on sm_90."""
    backend = device_without_kernels()
    gemv.COLUMNS = INTERPRETED_COLUMNS
    tuning = Tuning(DEVICE.generation, processors)
    backend.ops = CudaOps(tuning)
    backend._groups = GroupFactory(EmulatedCommunicator)
    backend.capabilities = replace(
        backend.capabilities,
        dtypes=DTYPES,
        sampling=True,
        kv_dtypes=tuning.kv_dtypes,
        rounding=ROUNDING,
        quantization=tuning.quantization,
    )
    return backend


def device_without_kernels() -> EmulatedBackend:
    """The emulated device with the CPU's ops, which take milliseconds where interpreted kernels
    take minutes: for tests of transfers between devices."""
    repair()
    backend = EmulatedBackend()
    backend.runtime = EmulatedRuntime()
    backend.memory = emulated_memory()
    backend.capabilities = replace(
        backend.capabilities,
        graphs=False,  # the CPU's op recorder does not see interpreted kernels
        transports=TRANSPORTS,
    )
    return backend


@cache
def emulated_library() -> ctypes.CDLL:
    """The driver's functions on host memory, compiled against NVIDIA's header."""
    source = Path(__file__).with_name("libcuda.c").read_text()
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    return compile_c("emulated_libcuda", source, ("-O2", "-pthread", f"-I{include}"))


@cache
def emulated_driver() -> CudaDriver:
    """The driver on top of the emulated functions."""
    return CudaDriver(emulated_library()._name)


def emulated_sharing() -> DeviceSharing:
    """The emulated device in an NVLink domain; EMULATED_IMEX_CHANNELS is its channels' folder."""
    source = Path(__file__).with_name("libnvidia-ml.c").read_text()
    nvml = compile_c("emulated_nvml", source, ("-O2",))._name
    channels = Path(os.environ.get("EMULATED_IMEX_CHANNELS", "/nonexistent"))
    return DeviceSharing(emulated_driver(), NvlinkFabric(nvml, channels))


def emulated_memory() -> CudaMemory:
    """Memory of the emulated device."""
    return CudaMemory(emulated_sharing(), [DEVICE], host_view)


def host_view(address: int, nbytes: int, index: int) -> torch.Tensor:
    """See ``memory.View``."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class InterpretedCopier(DeviceCopier):
    """Interprets the copy kernel for small copies only; large ones would take too long."""

    def __init__(self, driver: CudaDriver, device: torch.device, index: int) -> None:
        super().__init__(driver, torch.device("cpu"), index)

    def launch(
        self, targets: Addresses, sources: Addresses, nbytes: Addresses, programs: int
    ) -> None:
        if len(nbytes) <= INTERPRETED_PIECES and nbytes.sum() <= INTERPRETED_BYTES:
            super().launch(targets, sources, nbytes, programs)
            return
        pieces = zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True)
        for target, source, size in pieces:
            self._driver.copy(target, source, size, self._stream)


def load_ipc() -> IpcTransport:
    """The ``cuda_ipc`` transport of the emulated device.

    With EMULATED_HOST_OF, every process with another process id behaves as if it ran on another
    host.
    """
    repair()
    if int(os.environ.get("EMULATED_HOST_OF", os.getpid())) != os.getpid():
        here = host_identity()
        ipc_protocol.host_identity = lambda: f"{here}/elsewhere"
    return IpcTransport(emulated_sharing(), InterpretedCopier)


def emulated_host_copies(index: int) -> CudaHostCopies:
    """Copies between the emulated device's memory and the host's."""
    repair()
    return CudaHostCopies(emulated_driver(), index, InterpretedCopier)


def load_staged() -> StagedTransport:
    """The ``staged`` transport of the emulated device."""

    def find_copies(device: str) -> CudaHostCopies:
        return emulated_host_copies(int(device.removeprefix("cuda:")))

    return StagedTransport(find_copies, {"tcp": InnerTransport(load_tcp(), 10)})


class DeviceBuffer:
    """A buffer of the transport suite in the emulated device's memory."""

    def __init__(self, nbytes: int) -> None:
        self._allocation = emulated_memory().allocate(nbytes, 0)

    @property
    def region(self) -> MemoryRegion:
        return self._allocation.region

    def put(self, content: NDArray[np.uint8]) -> None:
        self._allocation.tensor.copy_(torch.from_numpy(content))

    def get(self) -> NDArray[np.uint8]:
        return self._allocation.tensor.numpy().copy()

    def close(self) -> None:
        self._allocation.free()


allocate: Callable[[int], DeviceBuffer] = DeviceBuffer
