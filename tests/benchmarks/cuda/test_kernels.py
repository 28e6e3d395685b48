"""The CUDA kernels beside the GPU's own limits, measured in the same run; needs an NVIDIA GPU.

Bandwidth is that of a copy inside the device (read and written bytes), products that of one large
``torch.matmul``. Times are of graphs' replays, so that launching costs neither side anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cuda_shapes import Heads, Shapes
from support.figures import Figure, record
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mooncake_hal.backend import Backend
from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.testing.backends import load_backend
from mooncake_hal_cuda.attention import Attention
from mooncake_hal_cuda.libraries import by_flashinfer

pytestmark = pytest.mark.cuda
ROUNDS = 20
COPY_BYTES = 1 << 30
HEADS = {"GQA 32/8": Heads(32, 8, 128, 4096), "GQA 64/8": Heads(64, 8, 128, 8192)}


@pytest.fixture(scope="module")
def cuda() -> Backend:
    try:
        backend = load_backend("cuda")
    except BackendUnavailable as exc:
        pytest.skip(str(exc))
    backend.runtime.bind_thread(0)
    return backend


def seconds_of(cuda: Backend, run: Callable[[], object]) -> float:
    """Median over replays of a graph."""

    def once() -> None:
        run()

    graph, times = cuda.runtime.capture(once), []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[ROUNDS // 2]


def copy_bandwidth(cuda: Backend) -> float:
    """Bytes read and written per second."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(cuda, lambda: target.copy_(source))


def matmul_rate(cuda: Backend) -> float:
    """Operations per second in bfloat16."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(cuda, lambda: a @ b)


@pytest.mark.parametrize("sequences", [1, 32, 256])
@pytest.mark.parametrize("context", [1024, 16384, 131072])
@pytest.mark.parametrize("name", HEADS)
def test_decode_attention(
    cuda: Backend, benchmark: Any, name: str, context: int, sequences: int
) -> None:
    """KV bytes per second against the copy's."""
    heads, block_size = HEADS[name], 16
    kv_bytes = sequences * context * heads.kv * heads.dim * 2 * 2
    if kv_bytes > 16 << 30:
        pytest.skip(f"{kv_bytes >> 30} GiB of KV are more than this is meant for")
    blocks = sequences * context // block_size
    cache = torch.randn(
        blocks, heads.kv, 2, block_size, heads.dim, device="cuda", dtype=torch.bfloat16
    )
    key, value = (cache[:, :, plane].transpose(1, 2) for plane in (0, 1))
    shapes = Shapes(cuda.ops, torch.bfloat16, "cuda:0", block_size)
    batch = shapes.batch(1, context // block_size, sequences)
    order = torch.randperm(blocks, device="cuda", dtype=torch.int32)
    batch.block_tables.copy_(order.view(sequences, -1))
    query = torch.randn(sequences, heads.query, heads.dim, device="cuda", dtype=torch.bfloat16)
    taken = seconds_of(cuda, lambda: cuda.ops.decode_attention(query, key, value, batch, 0.09))
    share = kv_bytes / taken / copy_bandwidth(cuda)
    title = f"decode attention, {name}, {sequences} x {context}"
    record(benchmark, Figure(title, share, 0.85, "of copy", context=f"{taken * 1e6:.0f} us"))
    benchmark(lambda: None)  # the figure is what counts


@pytest.mark.parametrize("sequences", [1, 32, 256])
@pytest.mark.parametrize("context", [1024, 16384])
def test_decode_beside_flashinfer(
    cuda: Backend, benchmark: Any, context: int, sequences: int
) -> None:
    """GQA 32/8 over caches in the layout that FlashInfer takes."""
    pytest.importorskip("flashinfer", reason="pip install mooncake-hal-cuda[flashinfer]")
    heads, block_size = HEADS["GQA 32/8"], 16
    blocks = sequences * context // block_size
    key, value = (
        torch.randn(blocks, block_size, heads.kv, heads.dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    batch = Shapes(cuda.ops, torch.bfloat16, "cuda:0", block_size).batch(
        1, context // block_size, sequences
    )
    order = torch.randperm(blocks, device="cuda", dtype=torch.int32)
    batch.block_tables.copy_(order.view(sequences, -1))
    query = torch.randn(sequences, heads.query, heads.dim, device="cuda", dtype=torch.bfloat16)
    call = Attention.of_decodes(query, (key, value), batch, 0.09, (1.0, 1.0))
    theirs = seconds_of(cuda, lambda: by_flashinfer(call))
    ours = seconds_of(cuda, lambda: cuda.ops.decode_attention(query, key, value, batch, 0.09))
    title = f"decode attention beside FlashInfer, {sequences} x {context}"
    times = f"{ours * 1e6:.0f} against {theirs * 1e6:.0f} us"
    record(benchmark, Figure(title, theirs / ours, 1.0, "times", context=times))
    benchmark(lambda: None)  # the figure is what counts


@pytest.mark.parametrize("name", HEADS)
def test_prefill_beside_sdpa(cuda: Backend, benchmark: Any, name: str) -> None:
    """A causal prompt of 8k tokens, for torch in one dense piece, by its fastest kernel."""
    heads, tokens, block_size = HEADS[name], 8192, 16
    dense = (
        torch.randn(1, count, tokens, heads.dim, device="cuda", dtype=torch.bfloat16)
        for count in (heads.query, heads.kv, heads.kv)
    )
    theirs = best_of_sdpa(cuda, *dense)
    cache = torch.randn(
        tokens // block_size, heads.kv, 2, block_size, heads.dim,
        device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    key, value = (cache[:, :, plane].transpose(1, 2) for plane in (0, 1))
    batch = Shapes(cuda.ops, torch.bfloat16, "cuda:0", block_size).batch(
        tokens, tokens // block_size, 1
    )
    batch.block_tables.copy_(torch.arange(tokens // block_size, device="cuda").view(1, -1))
    query = torch.randn(tokens, heads.query, heads.dim, device="cuda", dtype=torch.bfloat16)
    ours = seconds_of(cuda, lambda: cuda.ops.prefill_attention(query, key, value, batch, 0.09))
    times = f"{ours * 1e3:.2f} against {theirs * 1e3:.2f} ms"
    title = f"prefill attention beside SDPA, {name}, {tokens}"
    record(benchmark, Figure(title, theirs / ours, 0.95, "times", context=times))
    benchmark(lambda: None)  # the figure is what counts


def best_of_sdpa(cuda: Backend, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Seconds of the faster of cuDNN and FlashAttention; one that refuses is out of the race."""
    times = []
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(kernel):
                times.append(
                    seconds_of(
                        cuda,
                        lambda: scaled_dot_product_attention(
                            query, key, value, is_causal=True, scale=0.09, enable_gqa=True
                        ),
                    )
                )
        except RuntimeError as exc:
            print(f"{kernel} is out: {exc}")  # into the benchmark's report
    return min(times)


@pytest.mark.parametrize("name", HEADS)
def test_prefill_attention(cuda: Backend, benchmark: Any, name: str) -> None:
    """Operations per second of a causal prompt of 8k tokens against a matrix product's."""
    heads, tokens, block_size = HEADS[name], 8192, 16
    blocks = tokens // block_size
    cache = torch.randn(
        blocks, heads.kv, 2, block_size, heads.dim, device="cuda", dtype=torch.bfloat16
    )
    key, value = (cache[:, :, plane].transpose(1, 2) for plane in (0, 1))
    shapes = Shapes(cuda.ops, torch.bfloat16, "cuda:0", block_size)
    batch = shapes.batch(tokens, blocks, 1)
    batch.block_tables.copy_(torch.randperm(blocks, device="cuda", dtype=torch.int32).view(1, -1))
    query = torch.randn(tokens, heads.query, heads.dim, device="cuda", dtype=torch.bfloat16)
    taken = seconds_of(cuda, lambda: cuda.ops.prefill_attention(query, key, value, batch, 0.09))
    operations = 2 * 2 * heads.query * heads.dim * tokens * tokens / 2
    share = operations / taken / matmul_rate(cuda)
    title = f"prefill attention, {name}, {tokens}"
    record(benchmark, Figure(title, share, 0.7, "of matmul", context=f"{taken * 1e3:.2f} ms"))
    benchmark(lambda: None)  # the figure is what counts


@pytest.mark.parametrize("sequences", [1, 32, 128])
def test_latent_decode(cuda: Backend, benchmark: Any, sequences: int) -> None:
    """The slower of reading the latents and of the products bounds it."""
    context, heads, block_size = 8192, 128, 64
    blocks = sequences * context // block_size
    latent, rope = (
        torch.randn(blocks, block_size, 1, dim, device="cuda", dtype=torch.bfloat16)
        for dim in (512, 64)
    )
    shapes = Shapes(cuda.ops, torch.bfloat16, "cuda:0", block_size)
    batch = shapes.batch(1, context // block_size, sequences)
    order = torch.randperm(blocks, device="cuda", dtype=torch.int32)
    batch.block_tables.copy_(order.view(sequences, -1))
    query = torch.randn(sequences, heads, 576, device="cuda", dtype=torch.bfloat16)
    taken = seconds_of(
        cuda, lambda: cuda.ops.mla_decode_attention(query, latent, rope, batch, 0.04)
    )
    read = sequences * context * 576 * 2 / copy_bandwidth(cuda)
    multiplied = sequences * context * heads * 2 * (576 + 512) / matmul_rate(cuda)
    share = max(read, multiplied) / taken
    title = f"latent decode, 128 heads, {sequences} x {context}"
    record(benchmark, Figure(title, share, 0.8, "of limit", context=f"{taken * 1e6:.0f} us"))
    benchmark(lambda: None)  # the figure is what counts
