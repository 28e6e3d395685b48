"""The CUDA backend's ops on an emulated device: host memory, and kernels by interpretation."""

from __future__ import annotations

from dataclasses import replace

from support.triton_interpreter import repair

from mooncake_hal_cpu.backend import CpuBackend
from mooncake_hal_cuda.ops import CudaOps
from mooncake_hal_cuda.tuning import Tuning

DTYPES = ("bfloat16", "float16", "float32")


def emulated_backend(generation: str = "sm_90", processors: int = 132) -> CpuBackend:
    """A CPU backend whose ops are those of CUDA, launched as on a device of that kind."""
    repair()
    backend = CpuBackend()
    backend.ops = CudaOps(Tuning(generation, processors))
    backend.capabilities = replace(backend.capabilities, dtypes=DTYPES)
    return backend
