"""Reference implementation of ``mooncake_hal.backend.Ops``, with which the conformance suite
compares backends: one sequence at a time, everything in float32.

Results are rounded to the inputs' dtype once, at the end. It is written for clarity, not speed.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from mooncake_hal.backend import AttentionBatch, SamplingMetadata
from mooncake_hal.backend_parts import quantize_kv
from mooncake_hal.fp8_linear import FP8_BLOCK, FP8_TINY, Fp8Weight
from mooncake_hal.latents import LatentRows
from mooncake_hal.rope_writes import ComposedRopeWrites, KVRows


class ReferenceOps:
    """The ops, implemented literally as their contract describes them."""

    _kv_scales = (1.0, 1.0)

    def with_kv_scales(self, first: float, second: float) -> ReferenceOps:
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
        block_size = key_cache.shape[1]
        for token, slot in enumerate(slot_mapping.tolist()):
            block, offset = divmod(slot, block_size)
            key_scale, value_scale = self._kv_scales
            key_cache[block, offset] = quantize_kv(key[token], key_scale, key_cache.dtype)
            value_cache[block, offset] = quantize_kv(value[token], value_scale, value_cache.dtype)

    def rope_and_write_kv(
        self,
        query: Tensor,
        rows: KVRows,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        composed = ComposedRopeWrites(self)
        return composed.rope_and_write_kv(query, rows, key_cache, value_cache, slot_mapping)

    def decode_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        keys, values = self._caches(key_cache, value_cache)
        return _attend(query, (keys,), values, batch, scale, _decodes(batch))

    def prefill_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        keys, values = self._caches(key_cache, value_cache)
        return _attend(query, (keys,), values, batch, scale, _prompts(batch))

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
        compressed, latent_dim = rows.compressed.unsqueeze(1), latent_cache.shape[-1]
        cos, sin = rows.cos_sin[rows.positions].float().unsqueeze(1).chunk(2, dim=-1)
        latent = self.rms_norm(compressed[..., :latent_dim], rows.norm_weight, rows.eps)
        rotated = _rotate(compressed[..., latent_dim:], cos, sin)
        self.write_kv(latent, rotated, latent_cache, rope_cache, slot_mapping)
        return _rotate(query, cos, sin)

    def mla_decode_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        latents, ropes = self._caches(latent_cache, rope_cache)
        return _attend(query, (latents, ropes), latents, batch, scale, _decodes(batch))

    def mla_prefill_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        latents, ropes = self._caches(latent_cache, rope_cache)
        return _attend(query, (latents, ropes), latents, batch, scale, _prompts(batch))

    def _caches(self, first: Tensor, second: Tensor) -> tuple[_Cache, _Cache]:
        return _Cache(first, self._kv_scales[0]), _Cache(second, self._kv_scales[1])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * inverse * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The sum is rounded to the inputs' dtype before it is normalised."""
        total = (x.float() + residual.float()).to(x.dtype)
        return self.rms_norm(total, weight, eps), total

    def rope(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def pack_weight(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = x.float() @ weight.float().T
        return (wide if bias is None else wide + bias.float()).to(x.dtype)

    def pack_fp8_weight(self, weight: Fp8Weight) -> Fp8Weight:
        return weight

    def fp8_linear(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        return self.linear(_as_input(x, weight), dequantised(weight), bias).to(x.dtype)

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (gate * torch.sigmoid(gate) * up).to(x.dtype)

    def pack_experts(self, weights: Tensor) -> tuple[Tensor, ...]:
        return weights.unbind(0)

    def unpack_experts(self, packed: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(packed)

    def moe(
        self,
        x: Tensor,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for token, experts in enumerate(expert_ids.tolist()):
            for choice, expert in enumerate(experts):
                inner = self.silu_mul(x[token].float() @ gate_up[expert].float().T)
                out[token] += expert_weights[token, choice] * (inner @ down[expert].float().T)
        return out.to(x.dtype)

    def pack_fp8_experts(self, weights: Fp8Weight) -> Fp8Weight:
        return weights

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
        rows, first, second = _as_input(x, gate_up), dequantised(gate_up), dequantised(down)
        out = torch.zeros_like(x, dtype=torch.float32)
        for token, experts in enumerate(expert_ids.tolist()):
            for choice, expert in enumerate(experts):
                product = (rows[token] @ first[expert].T).to(x.dtype)
                inner = _as_input(self.silu_mul(product.float()), down)
                out[token] += expert_weights[token, choice] * (inner @ second[expert].T)
        return out.to(x.dtype)

    def sample(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
        shares = sampling_shares(logits, sampling_metadata)
        chosen = [
            int((row.cumsum(0) <= number).sum().clamp(max=len(row) - 1))
            for row, number in zip(shares, sampling_metadata.uniforms.tolist(), strict=True)
        ]
        return torch.tensor(chosen, dtype=torch.int64, device=logits.device)

    def argmax(self, logits: Tensor) -> Tensor:
        tokens = logits.float().argmax(dim=-1, keepdim=True)  # a NaN counts as largest
        return tokens.masked_fill(~logits.gather(1, tokens).isfinite(), -1).squeeze(1)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            cache[new] = cache[old]

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
        for row, block in enumerate(block_ids.tolist()):
            staging[row] = cache[block]

    def scatter_blocks(self, staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
        for row, block in enumerate(block_ids.tolist()):
            cache[block] = staging[row]


def sampling_shares(logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
    """Each token's probability after the filters: [rows, vocab] float64."""
    shares = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    knobs = (
        sampling_metadata.temperatures,
        sampling_metadata.top_ks,
        sampling_metadata.top_ps,
        sampling_metadata.min_ps,
    )
    for row, (temperature, top_k, top_p, min_p) in enumerate(zip(*knobs, strict=True)):
        if temperature == 0:
            shares[row, logits[row].argmax()] = 1
            continue
        weights = ((logits[row] - logits[row].max()).double() / temperature).exp()
        weights[weights < min_p] = 0
        if 0 < top_k < len(weights):
            weights[weights < weights.topk(int(top_k)).values[-1]] = 0
        ordered = weights.sort(descending=True).values
        reached = (ordered.cumsum(0) < top_p.double() * weights.sum()).sum()
        weights[weights < ordered[reached.clamp(max=len(ordered) - 1)]] = 0
        shares[row] = weights / weights.sum()
    return shares


def dequantised(weight: Fp8Weight) -> Tensor:
    """The dequantised weight: [out, in] or [experts, out, in] float32."""
    scales = weight.scales
    if not weight.is_blockwise:
        return weight.values.float() * scales.unsqueeze(-1)
    rows, columns = weight.values.shape[-2:]
    wide = scales.repeat_interleave(FP8_BLOCK, -2).repeat_interleave(FP8_BLOCK, -1)
    return weight.values.float() * wide[..., :rows, :columns]


def _as_input(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x quantised as the weight's kind of scales requires, and dequantised again: float32."""
    groups = torch.split(x.float(), FP8_BLOCK if weight.is_blockwise else x.shape[-1], dim=-1)
    return torch.cat([_through_fp8(group, weight.input_scale) for group in groups], dim=-1)


def _through_fp8(x: Tensor, scale: Tensor | None) -> Tensor:
    """x quantised by ``scale``, or by each row's largest element if it is None, and dequantised
    again: float32."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    if scale is None:
        largest = x.abs().amax(-1, keepdim=True).clamp(min=FP8_TINY)
        # divided by a tensor: CUDA implements division by a number as a product with its reciprocal
        scale = largest / largest.new_tensor(limit)
    return (x / scale).clamp(-limit, limit).to(torch.float8_e4m3fn).float() * scale


class _Cache(NamedTuple):
    """One layer's plane of paged KV, and the scale by which its values were divided."""

    blocks: Tensor  # [num_blocks, block_size, kv_heads, dim]
    scale: float

    def rows(self, batch: AttentionBatch, sequence: int) -> Tensor:
        """A sequence's rows in float32; reads only its own blocks, since a pool may be large."""
        context = batch.host_context_lens[sequence]
        ids = batch.block_tables[sequence, : -(-context // batch.block_size)]
        return self.blocks[ids.long()].flatten(0, 1)[:context].float() * self.scale


def _decodes(batch: AttentionBatch) -> range:
    return range(batch.num_decodes)


def _prompts(batch: AttentionBatch) -> range:
    return range(batch.num_decodes, len(batch.host_query_lens))


def _attend(
    query: Tensor,
    keys: tuple[_Cache, ...],
    values: _Cache,
    batch: AttentionBatch,
    scale: float,
    sequences: range,
) -> Tensor:
    """Attention of the given sequences; a token's key is the concatenation of its rows in all
    ``keys``."""
    out = query.new_empty(*query.shape[:2], values.blocks.shape[-1])
    start = 0
    for sequence in sequences:
        stop = start + batch.host_query_lens[sequence]
        key = torch.cat([cache.rows(batch, sequence) for cache in keys], dim=-1)
        value = values.rows(batch, sequence)
        out[start:stop] = _causal(query[start:stop], key, value, scale)
        start = stop
    return out


def _causal(
    query: Tensor,  # [new tokens, heads, head_dim]
    key: Tensor,  # [context, kv_heads, head_dim]
    value: Tensor,
    scale: float,
) -> Tensor:
    """Textbook causal attention; the new tokens are the last ones of the context."""
    new, context = query.shape[0], key.shape[0]
    group = query.shape[1] // key.shape[1]
    wide_key = key.float().repeat_interleave(group, dim=1)
    wide_value = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), wide_key) * scale
    visible = torch.ones(new, context, dtype=torch.bool).tril(context - new)
    weights = scores.masked_fill(~visible.to(scores.device), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_value).to(query.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(rotated, dim=-1).to(x.dtype)
