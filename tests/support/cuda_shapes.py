"""Calls the CUDA backend's ops with the shapes of real models, on tensors of any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mooncake_hal.backend import AttentionBatch, SamplingMetadata
from mooncake_hal.fp8_linear import Fp8Weight
from mooncake_hal.latents import LatentRows
from mooncake_hal.rope_writes import KVRows, QKNorms
from mooncake_hal_cuda.cuda_ops import CudaOps
from mooncake_hal_cuda.launch_tuning import Tuning
from mooncake_hal_cuda.one_shot_all_reduce import OneShotAllReduce
from mooncake_hal_cuda.transports.device_copier import HOST, launch_copy

BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class Heads:
    """The grouped attention of one rank of a model."""

    query: int
    kv: int
    dim: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Experts:
    """One rank's part of a layer of experts."""

    count: int
    chosen: int
    hidden: int
    inner: int


GROUPED = {
    "Llama-3-8B": Heads(32, 8, 128, 4096),
    "Llama-3-70B, 1 of 8 ranks": Heads(8, 1, 128, 8192),
    "Qwen2.5-0.5B": Heads(14, 2, 64, 896),
}
LINEARS = {"Qwen3-8B-FP8, qkv": (4096, 6144), "DeepSeek-V3, down": (7168, 2112)}
"""(in, out) features of linear layers."""
LATENT_HEADS = {"DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128, "DeepSeek-V3, 1 of 8 ranks": 16}
EXPERTS = {"Mixtral-8x7B": Experts(8, 2, 4096, 14336), "DeepSeek-V3": Experts(256, 8, 7168, 2048)}


@dataclass(frozen=True, slots=True)
class Shapes:
    """Makes tensors and calls ops with them.

    Args:
        ops: under test.
        dtype: of all floating-point tensors.
        device: of all tensors.
        block_size: tokens per block of the caches.
        kv_dtype: of the caches; None: ``dtype``.
        make: makes a tensor of a shape; on a device that computes, its values must be valid
            indices.
    """

    ops: CudaOps
    dtype: torch.dtype
    device: str = "meta"
    block_size: int = 16
    kv_dtype: torch.dtype | None = None
    make: Callable[..., Tensor] = torch.empty

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of that shape."""
        return self.make(shape, dtype=dtype or self.dtype, device=self.device)

    def batch(self, new_tokens: int, width: int, sequences: int = 4) -> AttentionBatch:
        """Sequences of equal length with block tables of ``width`` entries."""
        decodes = sequences if new_tokens == 1 else 0
        of_device = {"dtype": torch.int32, "device": self.device}
        context = width * self.block_size
        return AttentionBatch(
            decodes,
            torch.arange(0, (sequences + 1) * new_tokens, new_tokens, **of_device),
            torch.full((sequences,), context, **of_device),
            self.new(sequences, width, dtype=torch.int32),
            self.new(sequences * new_tokens, dtype=torch.int64),
            self.block_size,
            (new_tokens,) * sequences,
            (context,) * sequences,
        )

    def rows(self, heads: Heads) -> None:
        """All row-wise ops of a decoder layer."""
        x, weight = self.new(4, heads.hidden), self.new(heads.hidden)
        self.ops.rms_norm(x, weight, 1e-5)
        self.ops.add_rms_norm(x, self.new(4, heads.hidden), weight, 1e-5)
        self.ops.silu_mul(self.new(4, 2 * heads.hidden))
        query, key = self.new(4, heads.query, heads.dim), self.new(4, heads.kv, heads.dim)
        self.ops.rms_norm(query, self.new(heads.dim), 1e-5)
        table = self.new(4096, heads.dim, dtype=torch.float32)
        self.ops.rope(query, key, self.new(4, dtype=torch.int64), table)

    def single_rows(self, heads: Heads) -> None:
        """The linear layers of a single stream's decode, with and without a bias."""
        weight = self.new(heads.query * heads.dim, heads.hidden)
        for bias in (None, self.new(len(weight))):
            self.ops.linear(self.new(1, heads.hidden), weight, bias)

    def fp8_linears(self, fan_in: int, fan_out: int) -> None:
        """Linear layers with e4m3 weights for decodes and prompts, scaled per row and per block."""
        weight = self.new(fan_out, fan_in, dtype=torch.float8_e4m3fn)
        float32 = torch.float32
        blocks = self.new(-(-fan_out // 128), -(-fan_in // 128), dtype=float32)
        for rows in (1, 32, 64, 2048):
            x = self.new(rows, fan_in)
            self.ops.fp8_linear(x, Fp8Weight(weight, blocks), self.new(fan_out))
        for scale in (None, self.new(1, dtype=float32)[0]):
            by_row = Fp8Weight(weight, self.new(fan_out, dtype=float32), scale)
            self.ops.fp8_linear(self.new(4, fan_in), by_row, None)

    def blocks(self, heads: Heads) -> None:
        """Writing KV and moving blocks."""
        cache = self.cache(heads.kv, heads.dim)
        new, ids = self.new(4, heads.kv, heads.dim), self.new(4, dtype=torch.int64)
        self.ops.write_kv(new, new, cache, cache, ids)
        self.ops.copy_blocks(cache, ids, ids)
        staging = self.new(4, *cache.shape[1:], dtype=self.kv_dtype)
        self.ops.gather_blocks(cache, ids, staging)
        self.ops.scatter_blocks(staging, cache, ids)

    def rope_writes(self, heads: Heads) -> None:
        """From the projection to attention, with and without norms of queries and keys."""
        cache, dim = self.cache(heads.kv, heads.dim), heads.dim
        fused = self.new(4, heads.query + 2 * heads.kv, dim)
        query, key, value = torch.split(fused, [heads.query, heads.kv, heads.kv], dim=1)
        ids, table = self.new(4, dtype=torch.int64), self.new(4096, dim, dtype=torch.float32)
        for norms in (None, QKNorms(self.new(dim), self.new(dim), 1e-6)):
            rows = KVRows(key, value, ids, table, norms)
            self.ops.rope_and_write_kv(query, rows, cache, cache, ids)

    def grouped(self, heads: Heads) -> None:
        """Decodes with short and long contexts, and prompts."""
        cache = self.cache(heads.kv, heads.dim)
        for new_tokens, width in ((1, 1), (1, 2048), (700, 64)):
            batch = self.batch(new_tokens, width)
            query = self.new(4 * new_tokens, heads.query, heads.dim)
            op = self.ops.decode_attention if new_tokens == 1 else self.ops.prefill_attention
            op(query, cache, cache, batch, 0.1)

    def latent(self, heads: int) -> None:
        """The same over latents of DeepSeek's widths."""
        latent, rope = self.cache(1, 512), self.cache(1, 64)
        for new_tokens, width in ((1, 1), (1, 2048), (700, 64)):
            batch = self.batch(new_tokens, width)
            query = self.new(4 * new_tokens, heads, 576)
            one = self.ops.mla_decode_attention
            op = one if new_tokens == 1 else self.ops.mla_prefill_attention
            op(query, latent, rope, batch, 0.1)
        ids = self.new(4, dtype=torch.int64)
        table = self.new(4096, 64, dtype=torch.float32)
        rows = LatentRows(self.new(4, 576), self.new(512), 1e-6, ids, table)
        self.ops.write_latents(self.new(4, heads, 64), rows, latent, rope, ids)

    def experts(self, layer: Experts) -> None:
        """A few tokens, and enough tokens that every expert has a full tile."""
        gate_up = (self.new(layer.count, 2 * layer.inner, layer.hidden),)
        down = (self.new(layer.count, layer.hidden, layer.inner),)
        for tokens in (1, 8, 64 * layer.count):
            ids = self.new(tokens, layer.chosen, dtype=torch.int64)
            weights = self.new(tokens, layer.chosen, dtype=torch.float32)
            self.ops.moe(self.new(tokens, layer.hidden), gate_up, down, ids, weights)

    def fp8_experts(self, layer: Experts) -> None:
        """The same with e4m3 weights, scaled per row and per block."""
        sizes = (2 * layer.inner, layer.hidden), (layer.hidden, layer.inner)
        for is_blockwise in (False, True):
            weights = []
            for rows, columns in sizes:
                values = self.new(layer.count, rows, columns, dtype=torch.float8_e4m3fn)
                blocks = (-(-rows // 128), -(-columns // 128))
                shape = blocks if is_blockwise else (rows,)
                scales = self.new(layer.count, *shape, dtype=torch.float32)
                weights.append(Fp8Weight(values, scales))
            for tokens in (1, 8, 64 * layer.count):
                ids = self.new(tokens, layer.chosen, dtype=torch.int64)
                scores = self.new(tokens, layer.chosen, dtype=torch.float32)
                self.ops.fp8_moe(self.new(tokens, layer.hidden), *weights, ids, scores)

    def cache(self, heads: int, dim: int) -> Tensor:
        """One plane of one layer of a 32-layer model, in the layout BHLPT."""
        layers_and_planes = 64
        shape = (BLOCKS, heads, layers_and_planes, self.block_size, dim)
        dense = self.new(*shape, dtype=self.kv_dtype)
        return dense[:, :, 1].transpose(1, 2)


_HOPPER = Tuning("sm_90", 132)


def sample_rows(
    rows: int = 4,
    vocab_size: int = 128_256,
    device: str = "meta",
    tuning: Tuning = _HOPPER,
) -> None:
    """Launch the token-sampling kernels."""
    floats = torch.ones(rows, device=device)
    filters = SamplingMetadata(floats, floats.int(), floats, floats, floats.double())
    CudaOps(tuning).sample(torch.zeros(rows, vocab_size, device=device), filters)


def argmax_rows(
    rows: int = 4, vocab_size: int = 128_256, device: str = "meta", tuning: Tuning = _HOPPER
) -> None:
    """Launch the kernels that find the largest logits, in bfloat16."""
    CudaOps(tuning).argmax(torch.zeros(rows, vocab_size, device=device, dtype=torch.bfloat16))


def sum_small(ranks: int, dtype: torch.dtype) -> None:
    """Launch the all-reduce of small messages as the first of ``ranks`` ranks, without a device."""
    meta = torch.device("meta")
    one_shot = OneShotAllReduce(0, [0] * ranks, meta, 60.0, lambda: None)
    for elements in (8, 4096):
        one_shot.run(torch.empty(elements, dtype=dtype, device=meta))


def copy_pieces(*, aligned: bool) -> None:
    """Launch the copy kernel of ``cuda_ipc`` on tensors of no device."""
    at = np.full(3, 4096, np.uint64)
    nbytes = np.full(3, 256 if aligned else 255, np.uint64)
    launch_copy(torch.device("meta"), at, at, nbytes, HOST.programs)
