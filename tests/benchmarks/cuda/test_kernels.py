"""The CUDA kernels compared with the GPU's own limits, measured in the same run; needs an NVIDIA
GPU.

The bandwidth limit is a copy of the same number of bytes inside the device (read and written), the
compute limit one large ``torch.matmul``. Attention runs on the library chosen for its shape, which
the table names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.cuda_flashinfer import best_of_flashinfer
from support.cuda_shapes import Heads, Shapes
from support.cuda_timing import copy_bandwidth, matmul_rate, seconds_of
from support.figures import Figure, record
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mooncake_hal.backend import AttentionBatch, Backend

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.timeout(900),
    # warnings of libraries about their own kernels are not our failures
    pytest.mark.filterwarnings("default"),
]
HEADS = {"GQA 32/8": Heads(32, 8, 128, 4096), "GQA 64/8": Heads(64, 8, 128, 8192)}
CONTEXTS = (1024, 8192, 32768, 131072)
SEQUENCES = (1, 8, 32, 128, 256)
PROMPT = 8192
BLOCK_SIZE = 16
SCALE = 0.09
MOST_OF_FREE = 0.8
DECODE_SHARES = ((512 << 20, 0.85), (128 << 20, 0.65), (0, 0.35))
"""Bytes of KV, and the share of a copy's bandwidth that a launch with this much KV should reach.
Below half a gigabyte, launch latency and the merge of splits matter; FlashInfer and FlashAttention
slow down alike, and the comparison with FlashInfer holds there."""
OWN_PREFILL, LIBRARY_PREFILL = 0.4, 0.7
"""Shares of a matrix product's rate: a library uses TMA and warp specialisation, our kernel
neither."""
LATENT_SHARES = {"reading": 0.8, "products": 0.42}
"""Target by limiting resource; products with 64 rows reach half the rate of larger ones."""
BFLOAT16 = {"device": "cuda", "dtype": torch.bfloat16}


@dataclass(frozen=True)
class Paged:
    """Paged keys and values of sequences of one length, with blocks in random order."""

    key: Tensor
    value: Tensor
    batch: AttentionBatch

    @classmethod
    def make(cls, cuda: Backend, heads: Heads, sequences: int, lengths: tuple[int, int]) -> Paged:
        """One layer in layout BHLPT; ``lengths``: new tokens per sequence, and total tokens."""
        width = lengths[1] // BLOCK_SIZE
        cache = torch.randn(
            sequences * width, heads.kv, 2, BLOCK_SIZE, heads.dim, **BFLOAT16
        )  # fmt: skip
        key, value = (cache[:, :, plane].transpose(1, 2) for plane in (0, 1))
        return cls(key, value, batch_of(cuda, sequences, lengths, BLOCK_SIZE))

    def decode(self, cuda: Backend, query: Tensor) -> Callable[[], object]:
        """Run the timed call."""
        return lambda: cuda.ops.decode_attention(query, self.key, self.value, self.batch, SCALE)


def batch_of(
    cuda: Backend, sequences: int, lengths: tuple[int, int], block_size: int
) -> AttentionBatch:
    """See ``Paged.make``."""
    new, context = lengths
    width = context // block_size
    shapes = Shapes(cuda.ops, torch.bfloat16, "cuda:0", block_size)
    batch = shapes.batch(new, width, sequences)
    order = torch.randperm(sequences * width, device="cuda", dtype=torch.int32)
    batch.block_tables.copy_(order.view(sequences, -1))
    return batch


def require_memory(nbytes: int) -> None:
    """Skip if the GPU has too little memory."""
    free, _ = torch.cuda.mem_get_info()
    if nbytes > MOST_OF_FREE * free:
        pytest.skip(f"{nbytes >> 30} GiB of KV, {free >> 30} GiB are free")


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", HEADS)
def test_decode_attention(
    cuda: Backend, benchmark: Any, name: str, context: int, sequences: int
) -> None:
    """KV bytes per second relative to a copy's."""
    heads = HEADS[name]
    kv_bytes = sequences * context * heads.kv * heads.dim * 2 * 2
    require_memory(kv_bytes)
    paged = Paged.make(cuda, heads, sequences, (1, context))
    query = torch.randn(sequences, heads.query, heads.dim, **BFLOAT16)
    taken = seconds_of(cuda, paged.decode(cuda, query))
    share = kv_bytes / taken / copy_bandwidth(cuda, kv_bytes)
    title = f"decode attention, {name}, {sequences} x {context}"
    times = f"{taken * 1e6:.0f} us, {kv_bytes / taken / 1e9:.0f} GB/s"
    bound = next(bound for least, bound in DECODE_SHARES if kv_bytes >= least)
    record(benchmark, Figure(title, share, bound, "of copy", context=times))
    benchmark(lambda: None)  # the recorded metric decides


@pytest.mark.parametrize("sequences", [1, 32, 256])
@pytest.mark.parametrize("context", [1024, 16384])
@pytest.mark.parametrize("name", HEADS)
def test_decode_against_flashinfer(
    cuda: Backend, benchmark: Any, name: str, context: int, sequences: int
) -> None:
    """Over caches in FlashInfer's layout, compared with the fastest of its kernels."""
    heads, width = HEADS[name], context // BLOCK_SIZE
    shape = (sequences * width, BLOCK_SIZE, heads.kv, heads.dim)
    require_memory(4 * torch.Size(shape).numel())
    key, value = (torch.randn(shape, **BFLOAT16) for _ in range(2))
    paged = Paged(key, value, batch_of(cuda, sequences, (1, context), BLOCK_SIZE))
    query = torch.randn(sequences, heads.query, heads.dim, **BFLOAT16)
    wanted = cuda.ops.decode_attention(query, key, value, paged.batch, SCALE)
    way, theirs = best_of_flashinfer(cuda, (query, key, value), paged.batch, SCALE, wanted)
    ours = seconds_of(cuda, paged.decode(cuda, query))
    title = f"decode attention beside FlashInfer, {name}, {sequences} x {context}"
    times = f"{ours * 1e6:.0f} against {theirs * 1e6:.0f} us of {way}"
    record(benchmark, Figure(title, theirs / ours, 1.0, "times", context=times))
    benchmark(lambda: None)  # the recorded metric decides


@pytest.mark.parametrize("name", HEADS)
def test_prefill_attention(
    cuda: Backend, benchmark: Any, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A causal prompt of 8k tokens: operations per second relative to a matrix product's, and time
    relative to the best of torch's kernels for the same prompt in contiguous memory."""
    heads = HEADS[name]
    theirs, kernel = best_of_sdpa(cuda, heads)
    paged = Paged.make(cuda, heads, 1, (PROMPT, PROMPT))
    query = torch.randn(PROMPT, heads.query, heads.dim, **BFLOAT16)
    caches = (paged.key, paged.value)
    with caplog.at_level(logging.INFO, "mooncake_hal_cuda.attention_libraries"):
        ours = seconds_of(
            cuda, lambda: cuda.ops.prefill_attention(query, *caches, paged.batch, SCALE)
        )
    operations = 2 * 2 * heads.query * heads.dim * PROMPT * PROMPT / 2
    share = operations / ours / matmul_rate(cuda)
    chosen = caplog.messages[-1] if caplog.messages else "chosen before"
    title = f"prefill attention, {name}, {PROMPT}"
    times = f"{ours * 1e3:.2f} ms; {chosen}"
    is_library = "runs on" in chosen and "runs on triton" not in chosen
    bound = LIBRARY_PREFILL if is_library else OWN_PREFILL
    record(benchmark, Figure(title, share, bound, "of matmul", context=times))
    times = f"{ours * 1e3:.2f} against {theirs * 1e3:.2f} ms of {kernel}"
    record(benchmark, Figure(f"{title}, beside SDPA", theirs / ours, 0.95, "times", context=times))
    benchmark(lambda: None)  # the recorded metrics decide


def best_of_sdpa(cuda: Backend, heads: Heads) -> tuple[float, str]:
    """Seconds of the faster of cuDNN and FlashAttention, and its name."""
    query, key, value = (
        torch.randn(1, count, PROMPT, heads.dim, **BFLOAT16)
        for count in (heads.query, heads.kv, heads.kv)
    )
    times: dict[str, float] = {}
    for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(kernel):
                times[kernel.name] = seconds_of(
                    cuda,
                    lambda: scaled_dot_product_attention(
                        query, key, value, is_causal=True, scale=SCALE, enable_gqa=True
                    ),
                )
        except RuntimeError as exc:
            print(f"{kernel} is out: {exc}")  # printed in the benchmark's report
    fastest = min(times, key=lambda name: times[name])
    return times[fastest], fastest


@pytest.mark.parametrize("sequences", [1, 32, 128])
@pytest.mark.parametrize("context", [1024, 8192, 131072])
def test_latent_decode(cuda: Backend, benchmark: Any, context: int, sequences: int) -> None:
    """The limit is the slower of reading the latents and computing the products."""
    heads, block_size = 128, 64
    latent_bytes = sequences * context * 576 * 2
    require_memory(latent_bytes)
    latent, rope = (
        torch.randn(sequences * context // block_size, block_size, 1, dim, **BFLOAT16)
        for dim in (512, 64)
    )
    batch = batch_of(cuda, sequences, (1, context), block_size)
    query = torch.randn(sequences, heads, 576, **BFLOAT16)
    taken = seconds_of(
        cuda, lambda: cuda.ops.mla_decode_attention(query, latent, rope, batch, 0.04)
    )
    read = latent_bytes / copy_bandwidth(cuda, latent_bytes)
    multiplied = sequences * context * heads * 2 * (576 + 512) / matmul_rate(cuda)
    title = f"latent decode, 128 heads, {sequences} x {context}"
    bound = "reading" if read > multiplied else "products"
    times = f"{taken * 1e6:.0f} us, bound by {bound}"
    share = max(read, multiplied) / taken
    record(benchmark, Figure(title, share, LATENT_SHARES[bound], "of limit", context=times))
    benchmark(lambda: None)  # the recorded metric decides
