"""Compiles every kernel of the CUDA backend to a cubin, at the specialisations of its call sites.

Shapes are those of real models, tensors are ``meta``: there is a compiler, and no device. ``make
test-cuda-compile`` runs all of it, ``make test`` a part.
"""

from __future__ import annotations

import pytest
import torch
import triton
from support.cuda_compiler import CompiledKernel, compiling
from support.cuda_shapes import (
    EXPERTS,
    GROUPED,
    LATENT_HEADS,
    LINEARS,
    Shapes,
    argmax_rows,
    copy_pieces,
    sample_rows,
    sum_small,
)

from mooncake_hal_cuda.cuda_ops import CudaOps
from mooncake_hal_cuda.launch_tuning import SHARED_BYTES, Tuning
from mooncake_hal_cuda.transports.device_copier import compile_copies

GENERATIONS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
"""Number of processors (SMs) of A100, H100 and B200."""

DTYPES = ("bfloat16", "float16", "float32")

E4M3 = torch.float8_e4m3fn

TENSOR_COLUMNS = 512
"""Columns of tensor memory. A kernel that needs more compiles without a message, but traps."""

MATRIX_UNITS = {"sm_80": "mma.sync", "sm_90": "wgmma.mma", "sm_100": "tcgen05.mma"}


REGISTERS = 64 << 10
"""Registers per processor."""

PROGRAMS_PER_PROCESSOR = 2
"""Programs of a small all-reduce per processor: 64 then fit on any device with 32 processors."""

LATENT_PRODUCTS = (512 + 64) // 16 + 64 // 16
"""Matrix instructions of one group of four warps per 64 tokens: half of all scores and sums."""


@pytest.fixture(params=GENERATIONS)
def generation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


MOST_SPILLED_BYTES = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7) else 8
"""Tile sizes are chosen for Triton 3.7, with which nothing is spilled; with 3.5 and 3.6, decodes
over fp8 KV spill 8 bytes."""


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[16, 128], ids=lambda size: f"blocks{size}")
def shapes(generation: str, dtype: str, request: pytest.FixtureRequest) -> Shapes:
    ops = CudaOps(Tuning(generation, GENERATIONS[generation]))
    return Shapes(ops, getattr(torch, dtype), block_size=request.param)


def check(generation: str, kernels: list[CompiledKernel], wanted: set[str]) -> None:
    """Check that these kernels were compiled, and that each fits the device."""
    assert {kernel.name for kernel in kernels} == wanted
    for kernel in kernels:
        assert kernel.cubin_bytes > 0
        assert kernel.shared_bytes <= SHARED_BYTES[generation], kernel
        assert kernel.tensor_columns <= TENSOR_COLUMNS, kernel
        assert kernel.spilled_bytes <= MOST_SPILLED_BYTES, kernel


def check_overlap(kernels: list[CompiledKernel]) -> None:
    """One tile is loaded asynchronously, bypassing registers, while another one is computed."""
    for kernel in kernels:
        if kernel.matrix_unit:
            assert kernel.wide_copies, kernel
            assert kernel.buffers >= 2, kernel


@pytest.mark.parametrize("model", GROUPED)
def test_rows(generation: str, dtype: str, shapes: Shapes, model: str) -> None:
    with compiling(generation) as kernels:
        shapes.rows(GROUPED[model])
    check(generation, kernels, {"rms_norm", "silu_mul", "rope"})


@pytest.mark.parametrize("model", GROUPED)
def test_single_rows(generation: str, dtype: str, shapes: Shapes, model: str) -> None:
    """Our kernel runs where it was faster than cuBLAS, and accesses 16 bytes at a time."""
    with compiling(generation) as kernels:
        shapes.single_rows(GROUPED[model])
    is_ours = generation == "sm_90" and dtype != "float32"
    check(generation, kernels, {"gemv"} if is_ours else set())
    assert all(kernel.widest_access == 16 for kernel in kernels)


@pytest.mark.parametrize("model", GROUPED)
def test_blocks(generation: str, dtype: str, shapes: Shapes, model: str) -> None:
    with compiling(generation) as kernels:
        shapes.blocks(GROUPED[model])
    check(generation, kernels, {"write_kv", "move_blocks"})


@pytest.mark.parametrize("model", GROUPED)
def test_rope_writes(generation: str, dtype: str, shapes: Shapes, model: str) -> None:
    """One launch replaces four, and every row is read and written 16 bytes at a time."""
    with compiling(generation) as kernels:
        shapes.rope_writes(GROUPED[model])
    check(generation, kernels, {"rope_and_write_kv"})
    assert len(kernels) == 2
    assert {kernel.widest_access for kernel in kernels} == {16}


@pytest.mark.parametrize("model", GROUPED)
def test_grouped_attention(generation: str, dtype: str, shapes: Shapes, model: str) -> None:
    with compiling(generation) as kernels:
        shapes.grouped(GROUPED[model])
    check(generation, kernels, {"decode_attention", "prefill_attention"})
    assert len(kernels) == 2  # of all decodes, which merge their splits, and of prompts
    if dtype != "float32":
        units = {kernel.matrix_unit for kernel in kernels if kernel.name == "prefill_attention"}
        assert MATRIX_UNITS[generation] in units  # for prompts; a decode has too few rows
        check_overlap(kernels)


@pytest.mark.parametrize("model", LATENT_HEADS)
def test_latent_attention(generation: str, dtype: str, shapes: Shapes, model: str) -> None:
    with compiling(generation) as kernels:
        shapes.latent(LATENT_HEADS[model])
    check(generation, kernels, {"latent_attention", "merge_splits", "write_latents"})
    assert [kernel.name for kernel in kernels].count("latent_attention") == 2
    if dtype != "float32":
        units = {kernel.matrix_unit for kernel in kernels if kernel.name == "latent_attention"}
        assert MATRIX_UNITS[generation] in units  # for prompts, and for decodes with 64 heads
        for kernel in kernels:
            if kernel.matrix_unit == "wgmma.mma":
                assert kernel.products == LATENT_PRODUCTS, kernel
        check_overlap(kernels)


@pytest.mark.parametrize("generation", ["sm_90", "sm_100"])
def test_narrow_kv(generation: str, dtype: str) -> None:
    """All kernels that access e4m3 caches, whose conversion sm_80 lacks."""
    ops = CudaOps(Tuning(generation, GENERATIONS[generation]))
    for block_size in (16, 128):
        shapes = Shapes(ops, getattr(torch, dtype), block_size=block_size, kv_dtype=E4M3)
        with compiling(generation) as kernels:
            shapes.blocks(GROUPED["Llama-3-8B"])
            shapes.rope_writes(GROUPED["Llama-3-8B"])
            for model in ("Llama-3-8B", "Qwen2.5-0.5B"):
                shapes.grouped(GROUPED[model])
            shapes.latent(LATENT_HEADS["DeepSeek-V3"])
        grouped = {
            "write_kv",
            "rope_and_write_kv",
            "move_blocks",
            "decode_attention",
            "prefill_attention",
        }
        latent = {"write_latents", "latent_attention", "merge_splits"}
        check(generation, kernels, grouped | latent)
        if dtype != "float32":
            check_overlap(kernels)


@pytest.mark.parametrize("generation", ["sm_90", "sm_100"])
@pytest.mark.parametrize("linear", LINEARS)
def test_fp8_linears(generation: str, dtype: str, linear: str) -> None:
    """Products of e4m3, which sm_80 lacks; 16 bytes at a time, with prefetched tiles."""
    ops = CudaOps(Tuning(generation, GENERATIONS[generation]))
    with compiling(generation) as kernels:
        Shapes(ops, getattr(torch, dtype)).fp8_linears(*LINEARS[linear])
    check(generation, kernels, {"quantise_rows", "quantise_blocks", "fp8_block_matmul"})
    units = {kernel.matrix_unit for kernel in kernels if kernel.name == "fp8_block_matmul"}
    assert units == {"mma.sync", MATRIX_UNITS[generation]}  # for few rows and for many
    assert all(kernel.widest_access == 16 for kernel in kernels)
    check_overlap(kernels)


@pytest.mark.parametrize("model", EXPERTS)
def test_experts(generation: str, dtype: str, shapes: Shapes, model: str) -> None:
    with compiling(generation) as kernels:
        shapes.experts(EXPERTS[model])
    check(
        generation,
        kernels,
        {"count_pairs", "group_pairs", "grouped_matmul", "silu_mul", "combine_experts"},
    )


@pytest.mark.parametrize("generation", ["sm_90", "sm_100"])
@pytest.mark.parametrize("model", EXPERTS)
def test_fp8_experts(generation: str, dtype: str, model: str) -> None:
    """Like linear layers on e4m3: 16 bytes at a time, with prefetched tiles."""
    ops = CudaOps(Tuning(generation, GENERATIONS[generation]))
    with compiling(generation) as kernels:
        Shapes(ops, getattr(torch, dtype)).fp8_experts(EXPERTS[model])
    products = [kernel for kernel in kernels if kernel.name == "fp8_grouped_matmul"]
    quantising = [kernel for kernel in kernels if kernel.name.startswith("quantise_")]
    check(
        generation,
        kernels,
        {
            "quantise_rows",
            "quantise_blocks",
            "count_pairs",
            "group_pairs",
            "fp8_grouped_matmul",
            "combine_experts",
        },
    )
    units = {kernel.matrix_unit for kernel in products}
    assert units == {"mma.sync", MATRIX_UNITS[generation]}  # for few rows and for many
    assert all(kernel.widest_access == 16 for kernel in (*products, *quantising))
    check_overlap(products)


def test_spans(generation: str) -> None:
    """The copy kernel of cuda_ipc, for aligned pieces and for unaligned ones."""
    with compiling(generation) as kernels:
        copy_pieces(aligned=True)
        copy_pieces(aligned=False)
    check(generation, kernels, {"copy_spans"})
    aligned, odd = kernels
    assert (aligned.widest_access, odd.widest_access) == (16, 8)


def test_spans_are_compiled_before_the_first_transfer(generation: str) -> None:
    with compiling(generation) as kernels:
        compile_copies()
        assert [kernel.name for kernel in kernels] == ["copy_spans"] * 2
        copy_pieces(aligned=True)
        copy_pieces(aligned=False)
    assert len(kernels) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_small_all_reduces(generation: str, dtype: str, ranks: int) -> None:
    """The same kernel for all sizes, 16 bytes at a time; all programs of a rank run at once. One
    rank is the case that compute-sanitizer checks."""
    with compiling(generation) as kernels:
        sum_small(ranks, getattr(torch, dtype))
    check(generation, kernels, {"one_shot_all_reduce"})
    [kernel] = kernels
    assert kernel.widest_access == 16
    assert kernel.registers * 32 * kernel.warps * PROGRAMS_PER_PROCESSOR <= REGISTERS


@pytest.mark.parametrize("vocab_size", [128_256, 151_936])
def test_sampling(generation: str, vocab_size: int) -> None:
    """Sampling over large vocabularies: logits are read 16 bytes at a time."""
    with compiling(generation) as kernels:
        sample_rows(vocab_size=vocab_size, tuning=Tuning(generation, GENERATIONS[generation]))
    check(generation, kernels, {"summarise_slices", "sample_tokens"})
    summary, sampling = kernels
    assert summary.widest_access == sampling.widest_access == 16
    assert summary.registers <= 64  # four programs per SM
    assert sampling.registers <= 128  # for 16 warps: with more, it would not launch


@pytest.mark.parametrize("vocab_size", [128_256, 151_936])
def test_argmax(generation: str, vocab_size: int) -> None:
    """Large vocabularies: logits are read 16 bytes at a time."""
    with compiling(generation) as kernels:
        argmax_rows(vocab_size=vocab_size, tuning=Tuning(generation, GENERATIONS[generation]))
    check(generation, kernels, {"argmax_slices", "argmax_rows"})
    assert kernels[0].widest_access == 16
