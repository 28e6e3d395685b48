"""Compiles the kernels of the CUDA backend's ops at the launch's specialisation, without a GPU.

An op that is called with ``meta`` tensors under ``compiling`` launches nothing: each kernel is
compiled to a cubin for the given generation, as Triton would at launch, and measured.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_MATRIX_UNITS = ("tcgen05.mma", "wgmma.mma", "mma.sync")
_WIDE_COPY = re.compile(r"cp\.async\.cg\.shared\.global[^;]*, 0x10")
_TILES = re.compile(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?:b?f16|f8E4M3FN),")
_ACCESSES = re.compile(r"(?:ld|st)\.global(?:\.\w+::\w+)*(?:\.v(\d))?\.[bufs](\d+)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """The compiled form of one launch.

    Args:
        name: the kernel's name.
        shared_bytes: dynamic shared memory per program.
        registers: per thread.
        spilled_bytes: stack and local memory per thread; 0 means that everything fits in registers.
        tensor_columns: columns of tensor memory; 0 where the generation has none.
        warps: per program.
        cubin_bytes: size of the cubin.
        matrix_unit: the best matrix-product instruction in the kernel, or none.
        products: how many of those instructions the kernel has.
        wide_copies: number of asynchronous 16-byte copies into shared memory (they bypass
            registers).
        buffers: tiles that are prefetched into shared memory; 0 if none.
        widest_access: bytes per thread of the widest load or store of device memory.
    """

    name: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    tensor_columns: int
    warps: int
    cubin_bytes: int
    matrix_unit: str
    products: int
    wide_copies: int
    buffers: int
    widest_access: int


class CompileOnlyDriver:
    """The methods of a driver that Triton's runtime calls before a launch."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def compiling(generation: str) -> Iterator[list[CompiledKernel]]:
    """Compile every launch in the body; the yielded list gets each specialisation once."""
    # up to Triton 3.4 the driver is an attribute; later it is a property
    slot = "_active" if hasattr(driver, "_active") else "active"
    before, run = getattr(driver, slot), JITFunction.run
    found: dict[Any, CompiledKernel] = {}
    functions: set[JITFunction] = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        functions.add(self)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in found:
            found[kernel.hash] = measure(kernel)
            kernels.append(found[kernel.hash])

    kernels: list[CompiledKernel] = []
    driver.set_active(CompileOnlyDriver(int(generation.removeprefix("sm_"))))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        setattr(driver, slot, before)
        for function in functions:  # their cache keys don't include the generation
            function.device_caches.clear()


def measure(kernel: Any) -> CompiledKernel:
    """Read the assembler's report of a cubin."""
    cubin = kernel.asm["cubin"]
    report = _resource_usage(cubin)
    usage = _USAGE.search(report)
    assert usage is not None, report
    registers, stack, _, local = map(int, usage.groups())
    unit = next((unit for unit in _MATRIX_UNITS if unit in kernel.asm["ptx"]), "")
    return CompiledKernel(
        kernel.metadata.name,
        kernel.metadata.shared,
        registers,
        stack + local,
        kernel.metadata.tmem_size,
        kernel.metadata.num_warps,
        len(cubin),
        unit,
        kernel.asm["ptx"].count(unit) if unit else 0,
        len(_WIDE_COPY.findall(kernel.asm["ptx"])),
        min(map(int, _TILES.findall(kernel.asm["ttgir"])), default=0),
        max(
            (
                int(count or 1) * int(bits) // 8
                for count, bits in _ACCESSES.findall(kernel.asm["ptx"])
            ),
            default=0,
        ),
    )


def _resource_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
