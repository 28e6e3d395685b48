"""The CPU's attention kernels compared with torch and with memory bandwidth.

Sides take turns in one run and the best of each counts, so that other load on the host affects
both. KV lies in blocks of 16 tokens in random order, in the backend's own memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest
import torch
from support.figures import Figure, record
from torch import Tensor

from mooncake_hal.backend import AttentionBatch
from mooncake_hal.testing.backends_data import Case, Shape, make_case
from mooncake_hal_cpu.cpu_backend import CpuBackend
from mooncake_hal_cpu.cpu_ops import NativeOps
from mooncake_hal_cpu.torch_ops import TorchOps

ROUNDS = 7
PAIRS = 21
BACKEND = CpuBackend()
Attention = Callable[[Tensor, Tensor, Tensor, AttentionBatch, float], Tensor]


@pytest.fixture
def native() -> NativeOps:
    assert isinstance(BACKEND.ops, NativeOps), "the kernels did not compile; see the log"
    return BACKEND.ops


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    shape, lengths = request.param
    made = make_case(BACKEND, shape, lengths)
    yield made
    made.kv.free()


def best_of(*sides: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Best seconds of each side, in turns."""
    for side in sides:
        side()
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for index, side in enumerate(sides):
            start = time.perf_counter()
            side()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def call(attention: Attention, case: Case) -> Callable[[], Tensor]:
    kv, scale = case.kv, case.shape.head_dim**-0.5
    return lambda: attention(case.query, kv.key, kv.value, case.batch, scale)


LARGE = {
    dtype: Shape(dtype, heads=32, kv_heads=8, head_dim=128) for dtype in ("bfloat16", "float32")
}
SMALL = {
    dtype: Shape(dtype, heads=12, kv_heads=4, head_dim=64) for dtype in ("bfloat16", "float32")
}


def latents(dtype: str, heads: int) -> Shape:
    """DeepSeek's latent cache, for some of its heads."""
    return Shape(dtype, heads=heads, kv_heads=1, head_dim=512, rope_dim=64)


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        pytest.param((LARGE["bfloat16"], [(1, 2048)] * 8), 1.9, id="bf16-8x2048-32to8x128"),
        pytest.param((LARGE["float32"], [(1, 2048)] * 8), 1.9, id="fp32-8x2048-32to8x128"),
        pytest.param((LARGE["bfloat16"], [(1, 8192)]), 1.9, id="bf16-1x8192-32to8x128"),
        pytest.param((SMALL["bfloat16"], [(1, 512)] * 32), 1.9, id="bf16-32x512-12to4x64"),
    ],
    indirect=["case"],
)
def test_decode_against_sdpa_per_sequence(
    benchmark: Any, native: NativeOps, case: Case, wanted: float
) -> None:
    ours, theirs = best_of(
        call(native.decode_attention, case), call(TorchOps().decode_attention, case)
    )
    benchmark.pedantic(call(native.decode_attention, case), rounds=ROUNDS)
    context = f"{ours * 1e3:.2f} ms against {theirs * 1e3:.2f} ms"
    name = f"cpu decode attention / SDPA, {label(case)}"
    record(benchmark, Figure(name, theirs / ours, wanted, "times", context=context))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param((LARGE["bfloat16"], [(1, 2048)] * 8), id="bf16-8x2048"),
        pytest.param((LARGE["float32"], [(1, 2048)] * 8), id="fp32-8x2048"),
    ],
    indirect=True,
)
def test_decode_against_reading_the_kv(benchmark: Any, native: NativeOps, case: Case) -> None:
    """The limit is one pass over the same bytes, in order, by as many threads.

    The memory's speed changes from one moment to the next: the median of pairs counts.
    """
    kv_bytes = case.kv.key[:-1].numel() * case.kv.key.element_size() * 2
    # the last layer's planes, which attention reads, are at the end of this layout
    words = case.kv.allocation.tensor[-kv_bytes:].view(torch.int64)
    decode = call(native.decode_attention, case)
    ours, reading = zip(*(best_of(decode, words.sum, rounds=1) for _ in range(PAIRS)), strict=True)
    benchmark.pedantic(decode, rounds=ROUNDS)
    rates = [kv_bytes / median(seconds) / 1e9 for seconds in (ours, reading)]
    context = f"{rates[0]:.1f} of {rates[1]:.1f} GB/s"
    name = f"cpu decode attention / reading, {label(case)}"
    ratio = median(theirs / mine for mine, theirs in zip(ours, reading, strict=True))
    record(benchmark, Figure(name, ratio, 0.5, "times", context=context))


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        pytest.param((latents("bfloat16", 16), [(1, 2048)] * 8), 2.0, id="bf16-8x2048-16"),
        pytest.param((latents("float32", 16), [(1, 2048)] * 8), 1.2, id="fp32-8x2048-16"),
        pytest.param((latents("bfloat16", 128), [(1, 2048)] * 8), 1.0, id="bf16-8x2048-128"),
    ],
    indirect=["case"],
)
def test_decode_over_latents_against_matrix_products(
    benchmark: Any, native: NativeOps, case: Case, wanted: float
) -> None:
    """With the number of heads of one of eight ranks, and of a single rank."""
    ours, theirs = best_of(
        call(native.mla_decode_attention, case), call(TorchOps().mla_decode_attention, case)
    )
    benchmark.pedantic(call(native.mla_decode_attention, case), rounds=ROUNDS)
    context = f"{ours * 1e3:.2f} ms against {theirs * 1e3:.2f} ms"
    name = f"cpu MLA decode attention / matmul, {case.shape.heads} heads, {label(case)}"
    record(benchmark, Figure(name, theirs / ours, wanted, "times", context=context))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param((SMALL["bfloat16"], [(512, 512)]), id="bf16-512"),
        pytest.param((SMALL["float32"], [(512, 512)]), id="fp32-512"),
        pytest.param((SMALL["bfloat16"], [(512, 2048)]), id="bf16-512-of-2048"),
    ],
    indirect=True,
)
def test_prefill_against_sdpa(benchmark: Any, native: NativeOps, case: Case) -> None:
    ours, theirs = best_of(
        call(native.prefill_attention, case), call(TorchOps().prefill_attention, case)
    )
    benchmark.pedantic(call(native.prefill_attention, case), rounds=ROUNDS)
    context = f"{ours * 1e3:.2f} ms against {theirs * 1e3:.2f} ms"
    name = f"cpu prefill attention / SDPA, {label(case)}"
    record(benchmark, Figure(name, theirs / ours, 1.0, "times", context=context))


def label(case: Case) -> str:
    """Batch, context, heads and dtype in a few characters."""
    shape, batch = case.shape, case.batch
    kind = {"bfloat16": "bf16", "float32": "fp32"}[shape.dtype]
    return f"{len(batch.host_context_lens)}x{batch.host_context_lens[0]} D{shape.head_dim} {kind}"
