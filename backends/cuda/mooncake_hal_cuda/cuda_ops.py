"""The ops of the CUDA backend: Triton kernels, and cuBLAS through torch for most ``linear`` calls.

No op synchronises with the device. Outputs come from torch's caching allocator, so that ops can be
captured in a graph.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor
from torch.nn import functional

from mooncake_hal.backend import AttentionBatch, SamplingMetadata
from mooncake_hal.fp8_linear import Fp8Weight
from mooncake_hal.latents import LatentRows
from mooncake_hal.rope_writes import KVRows
from mooncake_hal_cuda import fp8_launch, moe_launch
from mooncake_hal_cuda.attention_launch import AttentionCall, attend_latent, dense_rows
from mooncake_hal_cuda.attention_libraries import OURS, GroupedAttention, LibraryChooser
from mooncake_hal_cuda.kernels.copy_kernels import move_blocks
from mooncake_hal_cuda.kernels.gemv import is_faster, multiply_row
from mooncake_hal_cuda.kernels.norm_rope_silu import rms_norm, rope, silu_mul
from mooncake_hal_cuda.kernels.paged_cache import write_kv, write_latents
from mooncake_hal_cuda.kernels.sampling_kernel import (
    GROUP,
    argmax_rows,
    argmax_slices,
    sample_tokens,
    summarise_slices,
)
from mooncake_hal_cuda.kv_write_launch import heads_together, launch_rope_writes
from mooncake_hal_cuda.launch_tuning import WIDTH, Tuning, power_of_two

_MOVED_ELEMENTS = 4096
_ARGMAX_STEPS, _ARGMAX_WIDTH = 2, 4096


class CudaOps:
    """``Ops``, ``ScaledKVOps``, ``RopeWriteOps``, ``Fp8LinearOps``, ``Fp8ExpertOps`` and
    ``SamplingOps``, implemented with Triton kernels.

    Args:
        tuning: launch parameters of this process's device.
        attention: the implementation of grouped-head attention, one of
            ``attention_libraries.NAMES``.
    """

    def __init__(self, tuning: Tuning, attention: str = OURS) -> None:
        self._tuning = tuning
        self._attend = GroupedAttention(tuning, LibraryChooser(attention))
        self._kv_scales = (1.0, 1.0)

    def with_kv_scales(self, first: float, second: float) -> CudaOps:
        scaled = copy(self)
        scaled._kv_scales = (first, second)
        return scaled

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        tokens, heads, key_dim = key.shape
        if tokens == 0:
            return
        key, value, value_dim = dense_rows(key), dense_rows(value), value.shape[2]
        write_kv[(tokens,)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *(1.0 / scale for scale in self._kv_scales),
            HEADS=heads,
            HEADS_PADDED=power_of_two(heads),
            KEY_DIM=key_dim,
            KEY_PADDED=power_of_two(key_dim),
            VALUE_DIM=value_dim,
            VALUE_PADDED=power_of_two(value_dim),
            BLOCK_SIZE=key_cache.shape[1],
            num_warps=4,
        )

    def rope_and_write_kv(
        self,
        query: Tensor,
        rows: KVRows,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        # the queries are normalised and rotated in place
        query = dense_rows(query)
        if len(query):
            caches = (key_cache, value_cache)
            launch_rope_writes(query, rows, caches, slot_mapping, self._kv_scales, self._tuning)
        return query

    def decode_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        caches = (key_cache, value_cache)
        call = AttentionCall.of_decodes(query, caches, batch, scale, self._kv_scales)
        return self._attend(call)

    def prefill_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        caches = (key_cache, value_cache)
        call = AttentionCall.of_prompts(query, caches, batch, scale, self._kv_scales)
        return self._attend(call)

    def pack_rope(self, rows: Tensor) -> Tensor:
        return rows

    def write_latents(
        self,
        query: Tensor,
        rows: LatentRows,
        latent_cache: Tensor,
        rope_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        # the queries are rotated in place
        query, compressed = dense_rows(query), dense_rows(rows.compressed)
        tokens, heads, rope_dim = query.shape
        if tokens == 0:
            return query
        half, latent_dim = rope_dim // 2, latent_cache.shape[3]
        together = heads_together(heads, half)
        write_latents[(tokens, -(-heads // together) + 1)](
            query,
            compressed,
            rows.norm_weight,
            rows.eps,
            rows.positions,
            rows.cos_sin.contiguous(),
            latent_cache,
            rope_cache,
            slot_mapping,
            *query.stride()[:2],
            compressed.stride(0),
            *latent_cache.stride()[:2],
            *rope_cache.stride()[:2],
            *(1.0 / scale for scale in self._kv_scales),
            QUERY_HEADS=heads,
            HEADS=together,
            LATENT_DIM=latent_dim,
            LATENT_PADDED=power_of_two(latent_dim),
            HALF=half,
            HALF_PADDED=power_of_two(half),
            BLOCK_SIZE=latent_cache.shape[1],
            num_warps=4,
        )
        return query

    def mla_decode_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        caches = (latent_cache, rope_cache)
        call = AttentionCall.of_decodes(query, caches, batch, scale, self._kv_scales)
        return attend_latent(call, self._tuning)

    def mla_prefill_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        caches = (latent_cache, rope_cache)
        call = AttentionCall.of_prompts(query, caches, batch, scale, self._kv_scales)
        return attend_latent(call, self._tuning)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x if x.dim() <= 3 and x.stride(-1) == 1 else x.contiguous().view(-1, x.shape[-1])
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _normalise(out, rows, None, weight, eps, self._tuning)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        # in place: x's memory receives the norm, the residual's memory the sum
        x, residual = x.contiguous(), residual.contiguous()
        _normalise(x, x.view(-1, x.shape[-1]), residual, weight, eps, self._tuning)
        return x, residual

    def rope(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        # in place
        query, key, half = dense_rows(query), dense_rows(key), cos_sin.shape[1] // 2
        tokens, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
        if tokens == 0:
            return query, key
        together = heads_together(heads, half)
        rope[(tokens, -(-heads // together) + -(-kv_heads // together))](
            query,
            key,
            positions,
            cos_sin.contiguous(),
            *query.stride()[:2],
            *key.stride()[:2],
            QUERY_HEADS=heads,
            KEY_HEADS=kv_heads,
            HALF=half,
            HALF_PADDED=power_of_two(half),
            HEADS=together,
            num_warps=4,
        )
        return query, key

    def pack_weight(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if is_faster(x, weight, bias, self._tuning):
            return multiply_row(x, weight, bias)
        return functional.linear(x, weight, bias)

    def pack_fp8_weight(self, weight: Fp8Weight) -> Fp8Weight:
        return fp8_launch.pack(weight)

    def fp8_linear(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        return fp8_launch.multiply(x, weight, bias, self._tuning)

    def silu_mul(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rows = x.reshape(-1, 2 * half)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
        if len(rows):
            silu_mul[(len(rows), -(-half // WIDTH))](
                out,
                rows,
                rows.stride(0),
                IS_EARLY=self._tuning.has_early_launches,
                HALF=half,
                WIDTH=WIDTH,
                num_warps=4,
                **self._tuning.early_launch(len(rows)),
            )
        return out

    def pack_experts(self, weights: Tensor) -> tuple[Tensor, ...]:
        """One dense tensor, [experts, out, in]."""
        return (weights.contiguous(),)

    def unpack_experts(self, packed: tuple[Tensor, ...]) -> Tensor:
        return packed[0]

    def moe(
        self,
        x: Tensor,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> Tensor:
        if len(x) == 0:
            return torch.empty_like(x)
        count, chosen = len(gate_up[0]), expert_ids.shape[1]
        tile = self._tuning.matmul(moe_launch.mean_rows(expert_ids, count), x.element_size())
        grouping = moe_launch.group_by_expert(expert_ids, count, tile)
        inner = self.silu_mul(moe_launch.multiply(x, gate_up[0], grouping, chosen, x.dtype))
        parts = moe_launch.multiply(inner, down[0], grouping, 1, torch.float32)
        return moe_launch.combine(parts, expert_weights, x.dtype)

    def pack_fp8_experts(self, weights: Fp8Weight) -> Fp8Weight:
        return fp8_launch.pack(weights)

    def unpack_fp8_experts(self, packed: Fp8Weight) -> Fp8Weight:
        return packed

    def fp8_moe(
        self,
        x: Tensor,
        gate_up: Fp8Weight,
        down: Fp8Weight,
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> Tensor:
        if len(x) == 0:
            return torch.empty_like(x)
        multiply, count = fp8_launch.multiply_experts, len(gate_up.values)
        tile = self._tuning.fp8_matmul(moe_launch.mean_rows(expert_ids, count))
        grouping = moe_launch.group_by_expert(expert_ids, count, tile)
        gated = multiply(x, gate_up, grouping, expert_ids.shape[1], x.dtype)
        parts = multiply(gated, down, grouping, 1, torch.float32, is_gated=True)
        return moe_launch.combine(parts, expert_weights, x.dtype)

    def sample(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
        # inverse transform sampling over the cumulative distribution in token order; tokens that
        # tie at a top-k or top-p limit are all kept
        logits = dense_rows(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if len(tokens):
            _sample(tokens, logits, sampling_metadata, self._tuning.sampled_groups)
        return tokens

    def argmax(self, logits: Tensor) -> Tensor:
        logits = dense_rows(logits)
        rows, vocab_size = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if rows == 0:
            return tokens
        slices = -(-vocab_size // (_ARGMAX_STEPS * _ARGMAX_WIDTH))
        maxima = torch.empty((rows, slices), device=logits.device)
        indexes = torch.empty((rows, slices), dtype=torch.int32, device=logits.device)
        argmax_slices[(slices, rows)](
            maxima,
            indexes,
            logits,
            vocab_size,
            logits.stride(0),
            STEPS=_ARGMAX_STEPS,
            WIDTH=_ARGMAX_WIDTH,
            num_warps=8,
        )
        argmax_rows[(rows,)](
            tokens,
            maxima,
            indexes,
            SLICES=slices,
            SLICES_PADDED=power_of_two(slices),
            num_warps=1,
        )
        return tokens

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy blocks within a cache; no block may be both a source and a target."""
        _move(cache, cache, source, target)

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
        _move(cache, staging, block_ids, None)

    def scatter_blocks(self, staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
        _move(staging, cache, None, block_ids)


def _sample(
    tokens: Tensor, logits: Tensor, sampling_metadata: SamplingMetadata, most_groups: int
) -> None:
    rows, vocab_size = logits.shape
    device, groups = logits.device, min(most_groups, power_of_two(-(-vocab_size // GROUP)))
    slices = -(-vocab_size // (groups * GROUP))
    of_slices = torch.empty((rows, slices), device=device)
    summary = (
        torch.empty((rows, slices * groups), device=device),
        of_slices,
        torch.empty_like(of_slices, dtype=torch.float64),
    )
    sizes = (vocab_size, logits.stride(0))
    summarise_slices[(slices, rows)](
        *summary, logits, sampling_metadata.temperatures, *sizes, GROUPS=groups, num_warps=8
    )
    sample_tokens[(rows,)](
        tokens,
        logits,
        *summary,
        torch.empty((rows, 2, slices * groups), dtype=torch.int32, device=device),
        sampling_metadata.temperatures,
        sampling_metadata.top_ks,
        sampling_metadata.top_ps,
        sampling_metadata.min_ps,
        sampling_metadata.uniforms,
        *sizes,
        SLICES=slices,
        SLICES_PADDED=power_of_two(slices),
        GROUPS=groups,
        num_warps=16,
    )


def _normalise(
    out: Tensor,
    x: Tensor,  # one to three dimensions, the last dense
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    tuning: Tuning,
) -> None:
    dim = x.shape[-1]
    rows = x.numel() // dim
    if rows == 0:
        return
    inner = x.shape[1] if x.dim() == 3 else 1
    outer_stride = x.stride(0) if x.dim() > 1 else 0
    padded = power_of_two(dim)
    rms_norm[(rows,)](
        out,
        x,
        out if residual is None else residual,
        weight,
        eps,
        inner,
        outer_stride,
        x.stride(1) if x.dim() == 3 else 0,
        DIM=dim,
        DIM_PADDED=padded,
        HAS_RESIDUAL=residual is not None,
        IS_EARLY=tuning.has_early_launches,
        num_warps=min(16, max(1, padded // 512)),
        **tuning.early_launch(rows),
    )


def _move(
    source: Tensor, target: Tensor, source_ids: Tensor | None, target_ids: Tensor | None
) -> None:
    ids = target_ids if source_ids is None else source_ids
    if ids is None or len(ids) == 0:
        return
    _, block_size, heads, dim = source.shape
    padded = power_of_two(dim)
    rows = min(power_of_two(block_size * heads), max(1, _MOVED_ELEMENTS // padded))
    move_blocks[(len(ids), -(-block_size * heads // rows))](
        source,
        target,
        ids if source_ids is None else source_ids,
        ids if target_ids is None else target_ids,
        *source.stride()[:3],
        *target.stride()[:3],
        HAS_SOURCE_IDS=source_ids is not None,
        HAS_TARGET_IDS=target_ids is not None,
        BLOCK_SIZE=block_size,
        HEADS=heads,
        DIM=dim,
        DIM_PADDED=padded,
        ROWS=rows,
        num_warps=4,
    )
