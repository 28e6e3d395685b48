"""Variants of the CPU backend for other machines: plain torch, and kernels for other CPUs."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_hal import native
from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends_experts import ExpertsSuite
from mooncake_hal.testing.backends_latent import LatentSuite
from mooncake_hal.testing.backends_ops import ALL_DTYPES, OpsSuite
from mooncake_hal.testing.backends_rows import RowsSuite
from mooncake_hal_cpu.cpu_backend import CpuBackend
from mooncake_hal_cpu.cpu_ops import NativeOps
from mooncake_hal_cpu.kernels import FLAGS, load_kernels
from mooncake_hal_cpu.torch_ops import TorchOps

X86 = platform.machine() == "x86_64"
# AVX2 and plain SSE2: neither AVX-512 nor bf16 products
ARCHITECTURES = ("x86-64-v3", "x86-64") if X86 else ("armv8-a",)
# AVX-512 with and without bf16 products, for machines that have neither
EMULATED = {"avx512": "", "avx512-bf16": "#define __AVX512BF16__ 1"} if X86 else {}
EMULATION = Path(__file__).parents[1] / "support" / "avx512_emulated.h"
COMPILE_TIMEOUT_S = 300


def variant(name: str) -> CpuBackend:
    backend = CpuBackend()
    if name in EMULATED:
        # Unrolled as for a real processor, it would take minutes to compile.
        flags = [flag for flag in FLAGS if not flag.startswith(("-march", "-O"))]
        before = f"{EMULATED[name]}\n{EMULATION.read_text()}"
        backend.ops = NativeOps(load_kernels([*flags, "-O1", "-march=x86-64-v3"], before))
    elif name == "torch":
        backend.ops = TorchOps()
        backend.capabilities = replace(backend.capabilities, dtypes=ALL_DTYPES, graphs=False)
    else:
        flags = [flag for flag in FLAGS if not flag.startswith("-march")]
        backend.ops = NativeOps(load_kernels([*flags, f"-march={name}"]))
    return backend


class TestVariants(OpsSuite, RowsSuite, ExpertsSuite, LatentSuite):
    @pytest.fixture(scope="module", params=["torch", *ARCHITECTURES])
    @staticmethod
    def backend(request: pytest.FixtureRequest) -> Backend:
        return variant(request.param)


@pytest.mark.slow
@pytest.mark.timeout(2 * COMPILE_TIMEOUT_S)
class TestEmulatedVariants(OpsSuite, RowsSuite, ExpertsSuite, LatentSuite):
    @pytest.fixture(scope="module", params=EMULATED)
    @staticmethod
    def backend(request: pytest.FixtureRequest) -> Backend:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "COMPILE_TIMEOUT_S", COMPILE_TIMEOUT_S)
            return variant(request.param)
