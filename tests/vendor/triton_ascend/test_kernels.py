"""The CUDA backend's kernels compiled by triton-ascend: which of them lower within its documented
limits, and whether their results, computed on the CPU, equal the reference.

The Ascend backend uses a torch-npu op for everything and calls none of these kernels; they could
replace an op that is missing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.triton_ascend import CompiledKernel, Tools, live_bytes, lower, violations
from torch import Tensor

from mooncake_hal.reference import ReferenceOps

TOOLS = Tools(Path(os.environ["MLIR_ROOT"]))
REFERENCE = ReferenceOps()


@dataclass(frozen=True)
class Case:
    """A kernel with the shapes of Llama-3-8B.

    Args:
        types: of its pointers and floats.
        constants: compile-time arguments.
        grid: of programs, for 256 tokens or blocks.
    """

    types: dict[str, str]
    constants: dict[str, Any]
    grid: tuple[int, ...]


def pointers(*names: str, kind: str = "bf16") -> dict[str, str]:
    return dict.fromkeys(names, f"*{kind}")


CASES = {
    "silu_mul": Case(
        pointers("out", "x"), {"IS_EARLY": False, "HALF": 14336, "WIDTH": 1024}, (256, 14)
    ),
    "rms_norm": Case(
        {**pointers("out", "x", "residual", "weight"), "eps": "fp32"},
        {"DIM": 4096, "DIM_PADDED": 4096, "HAS_RESIDUAL": True, "IS_EARLY": False},
        (256,),
    ),
    "rope": Case(
        {
            **pointers("query", "key"),
            **pointers("positions", kind="i64"),
            **pointers("cos_sin", kind="fp32"),
        },
        {"QUERY_HEADS": 32, "KEY_HEADS": 8, "HALF": 64, "HALF_PADDED": 64, "HEADS": 8},
        (256, 5),
    ),
    "move_blocks": Case(
        {**pointers("source", "target"), **pointers("source_ids", "target_ids", kind="i64")},
        {
            "HAS_SOURCE_IDS": True,
            "HAS_TARGET_IDS": False,
            "BLOCK_SIZE": 128,
            "HEADS": 8,
            "DIM": 128,
            "DIM_PADDED": 128,
            "ROWS": 64,
        },
        (256, 16),
    ),
    "write_kv": Case(
        {
            **pointers("key", "value", "key_cache", "value_cache"),
            **pointers("slot_mapping", kind="i64"),
            "key_factor": "fp32",
            "value_factor": "fp32",
        },
        {
            "HEADS": 8,
            "HEADS_PADDED": 8,
            "KEY_DIM": 128,
            "KEY_PADDED": 128,
            "VALUE_DIM": 128,
            "VALUE_PADDED": 128,
            "BLOCK_SIZE": 128,
        },
        (256,),
    ),
}
DRAWING = Case(
    {
        **pointers("maxima", "slice_maxima", "logits", "temperatures", kind="fp32"),
        **pointers("slice_masses", kind="fp64"),
    },
    {"GROUPS": 64},
    (16, 256),
)
"""The kernel that summarises each row's slices of logits before tokens are sampled."""


MODULES = ("norm_rope_silu", "paged_cache", "copy_kernels", "moe_kernels", "sampling_kernel")


def kernel_of(name: str) -> Any:
    modules = (import_module(f"mooncake_hal_cuda.kernels.{module}") for module in MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))


def lowered(name: str, case: Case, **changes: Any) -> str:
    return lower(kernel_of(name), case.types, {**case.constants, **changes})


def compiled(name: str, **changes: Any) -> CompiledKernel:
    return CompiledKernel(lowered(name, CASES[name], **changes), TOOLS)


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CASES))
def test_kernel_is_within_the_limits(name: str) -> None:
    case = CASES[name]
    linalg = lowered(name, case)
    assert violations(linalg, case.grid) == []
    assert live_bytes(linalg) > 0


def test_sampling_kernel_breaks_a_limit() -> None:
    """The Ascend backend would need another one, since this one counts in float64."""
    found = violations(lowered("summarise_slices", DRAWING), DRAWING.grid)
    assert "uses float64, which the vector cores do not have" in found


def test_violation_of_a_limit_is_found() -> None:
    wide = lowered("silu_mul", CASES["silu_mul"], WIDTH=16384)
    (full,) = violations(wide, (1,))
    assert full.startswith("holds ")
    (many,) = violations(lowered("silu_mul", CASES["silu_mul"]), (65536, 1))
    assert many == "has 65536 programs, Ascend starts 65535 at most"
    narrow = violations(lowered("silu_mul", CASES["silu_mul"], WIDTH=8), (1,))
    assert "has rows of 16 bytes, not of 32" in narrow


# -- numbers ---------------------------------------------------------------------------------------


def test_silu_mul() -> None:
    x, out = random(3, 1000), torch.zeros(3, 500).bfloat16()
    compiled("silu_mul", HALF=500, WIDTH=256)((3, 2), out, x, 1000)
    assert_close(out, REFERENCE.silu_mul(x))


@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm(has_residual: bool) -> None:
    x, weight, residual = random(4, 500), random(500), random(4, 500)
    before = residual.clone()
    out = torch.zeros_like(x)
    kernel = compiled("rms_norm", DIM=500, DIM_PADDED=512, HAS_RESIDUAL=has_residual)
    kernel((4,), out, x, residual, weight, 1e-6, 1, 500, 0)
    if has_residual:
        wanted, added = REFERENCE.add_rms_norm(x.clone(), before, weight, 1e-6)
        assert_close(residual, added)
        assert_close(out, wanted)
    else:
        assert_close(out, REFERENCE.rms_norm(x, weight, 1e-6))


def test_rope() -> None:
    query, key = random(3, 4, 32), random(3, 2, 32)
    positions, cos_sin = torch.tensor([0, 5, 99]), torch.randn(100, 32)
    wanted = REFERENCE.rope(query.clone(), key.clone(), positions, cos_sin)
    kernel = compiled("rope", QUERY_HEADS=4, KEY_HEADS=2, HALF=16, HALF_PADDED=16, HEADS=2)
    kernel((3, 3), query, key, positions, cos_sin, 128, 32, 64, 32)
    for found, meant in zip((query, key), wanted, strict=True):
        assert_close(found, meant)


@pytest.mark.parametrize("packs", [True, False])
def test_move_blocks(packs: bool) -> None:
    cache, ids = random(9, 16, 2, 80), torch.tensor([7, 0, 3])
    staging = random(3, 16, 2, 80)
    wanted_cache, wanted_staging = cache.clone(), staging.clone()
    kernel = compiled(
        "move_blocks",
        HAS_SOURCE_IDS=packs,
        HAS_TARGET_IDS=not packs,
        BLOCK_SIZE=16,
        HEADS=2,
        DIM=80,
        DIM_PADDED=128,
        ROWS=16,
    )
    ends = (cache, staging) if packs else (staging, cache)
    strides = [stride for end in ends for stride in end.stride()[:3]]
    kernel((3, 2), *ends, ids, ids, *strides)
    if packs:
        REFERENCE.gather_blocks(wanted_cache, ids, wanted_staging)
    else:
        REFERENCE.scatter_blocks(wanted_staging, wanted_cache, ids)
    assert torch.equal(cache, wanted_cache)
    assert torch.equal(staging, wanted_staging)


def test_write_kv() -> None:
    key, value = random(3, 2, 64), random(3, 2, 64)
    caches = random(5, 16, 2, 64), random(5, 16, 2, 64)
    wanted = tuple(cache.clone() for cache in caches)
    slots = torch.tensor([17, 0, 79])
    REFERENCE.write_kv(key, value, *wanted, slots)
    dims = {"KEY_DIM": 64, "KEY_PADDED": 64, "VALUE_DIM": 64, "VALUE_PADDED": 64}
    kernel = compiled("write_kv", HEADS=2, HEADS_PADDED=2, BLOCK_SIZE=16, **dims)
    strides = [stride for cache in caches for stride in cache.stride()[:3]]
    kernel((3,), key, value, *caches, slots, 128, 64, 128, 64, *strides, 1.0, 1.0)
    for found, meant in zip(caches, wanted, strict=True):
        assert torch.equal(found, meant)
