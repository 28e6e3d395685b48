"""The CPU's row kernels compared with torch, at the sizes of a decode and of a prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.figures import Figure, record
from torch.utils.benchmark import Timer

from mooncake_hal_cpu.cpu_backend import CpuBackend
from mooncake_hal_cpu.cpu_ops import NativeOps
from mooncake_hal_cpu.torch_ops import TorchOps

BACKEND = CpuBackend()
Run = Callable[[TorchOps], object]


def rows(tokens: int, dtype: torch.dtype) -> dict[str, Run]:
    """Run each op over one layer's rows of a model with 12 to 4 heads of 64."""
    x, residual = (torch.randn(tokens, 768).to(dtype) for _ in range(2))
    weight, gate_up = torch.randn(768).to(dtype), torch.randn(tokens, 4096).to(dtype)
    query, key = (torch.randn(tokens, heads, 64).to(dtype) for heads in (12, 4))
    positions, cos_sin = torch.arange(tokens), torch.randn(2048, 64)
    caches = [torch.zeros(64, 4, 16, 64, dtype=dtype).transpose(1, 2) for _ in range(2)]
    return {
        "rms_norm": lambda ops: ops.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda ops: ops.add_rms_norm(x, residual, weight, 1e-5),
        "rope": lambda ops: ops.rope(query, key, positions, cos_sin),
        "silu_mul": lambda ops: ops.silu_mul(gate_up),
        "write_kv": lambda ops: ops.write_kv(key, key, caches[0], caches[1], positions),
    }


def best_us(run: Run, ops: TorchOps) -> float:
    timer = Timer("run(ops)", globals={"run": run, "ops": ops}, num_threads=torch.get_num_threads())
    return min(timer.timeit(50).mean for _ in range(5)) * 1e6


@pytest.mark.parametrize("tokens", [8, 512])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "rope", "silu_mul", "write_kv"])
def test_row_op(benchmark: Any, name: str, tokens: int) -> None:
    ops = BACKEND.ops
    assert isinstance(ops, NativeOps), "the kernels did not compile; see the log"
    run = rows(tokens, torch.bfloat16)[name]
    ours, theirs = best_us(run, ops), best_us(run, TorchOps())
    benchmark.pedantic(run, (ops,), rounds=20)
    context = f"{ours:.1f} against {theirs:.1f} µs"
    record(benchmark, Figure(f"cpu {name} / torch, {tokens} tokens", theirs / ours, 1.0, "times",
                             context=context))  # fmt: skip
