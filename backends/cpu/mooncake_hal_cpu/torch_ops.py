"""The ops of the CPU backend in plain torch, for hosts without a compiler and for unusual shapes.

Attention is computed per sequence, so that a sequence's result does not depend on the rest of its
batch.
"""

from __future__ import annotations

from copy import copy
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from mooncake_hal.backend import AttentionBatch
from mooncake_hal.backend_parts import quantize_kv
from mooncake_hal.latents import ComposedLatentWrites
from mooncake_hal_cpu.op_replay import refuse_capture

_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch
# number of rows for which oneDNN arranges weights; by measurement the choice hardly matters, but 1
# is slow for float32
_PACK_TOKENS = 64
# latent attention: largest number of tokens, and of scores (tokens x heads x context), per matrix
# product
_MLA_TOKENS = 64
_MLA_SCORES = 1 << 22


class TorchOps(ComposedLatentWrites):
    """``Ops`` in plain torch, with as few calls as torch allows."""

    _kv_scales = (1.0, 1.0)

    def with_kv_scales(self, first: float, second: float) -> TorchOps:
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
        blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
        where = (blocks, slot_mapping - blocks * block_size)
        key_scale, value_scale = self._kv_scales
        key_cache.index_put_(where, quantize_kv(key, key_scale, key_cache.dtype))
        value_cache.index_put_(where, quantize_kv(value, value_scale, value_cache.dtype))

    def decode_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        return self._attend(query, (key_cache, value_cache), batch, scale, range(batch.num_decodes))

    def prefill_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        sequences = range(batch.num_decodes, len(batch.host_query_lens))
        return self._attend(query, (key_cache, value_cache), batch, scale, sequences)

    def mla_decode_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        planes = (latent_cache, rope_cache)
        sequences = range(batch.num_decodes)
        return _attend_latents(query, planes, batch, scale, sequences, self._kv_scales)

    def mla_prefill_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        planes = (latent_cache, rope_cache)
        sequences = range(batch.num_decodes, len(batch.host_query_lens))
        return _attend_latents(query, planes, batch, scale, sequences, self._kv_scales)

    def _attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        scale: float,
        sequences: range,
    ) -> Tensor:
        """Attention of some sequences; KV scales are applied to the scores and to the result."""
        refuse_capture("attention in plain torch")
        key_scale, value_scale = self._kv_scales
        out = torch.empty_like(query)
        start = 0
        for sequence in sequences:
            stop = start + batch.host_query_lens[sequence]
            context = batch.host_context_lens[sequence]
            blocks = batch.block_tables[sequence, : -(-context // batch.block_size)]
            planes = [cache.index_select(0, blocks).flatten(0, 1)[:context] for cache in caches]
            key, value = (plane.to(query.dtype) for plane in planes)
            out[start:stop] = _attend_one(query[start:stop], key, value, scale * key_scale)
            start = stop
        return out if value_scale == 1.0 else out.mul_(value_scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rope(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def pack_weight(self, weight: Tensor) -> Tensor:
        """Reorder a weight into oneDNN's blocked format, which oneDNN would do in every call."""
        if weight.dtype not in _packed_dtypes():
            return weight
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_TOKENS)
        return packed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not weight.is_mkldnn:
            return functional.linear(x, weight, bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def pack_experts(self, weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.pack_weight(weight) for weight in weights)

    def unpack_weight(self, packed: Tensor) -> Tensor:
        """The inverse of ``pack_weight``: the dense weight."""
        return packed.to_dense() if packed.is_mkldnn else packed

    def unpack_experts(self, packed: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([self.unpack_weight(weight) for weight in packed])

    def moe(
        self,
        x: Tensor,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> Tensor:
        """Sort tokens by expert, run each expert on its tokens, and restore the order."""
        refuse_capture("sorting tokens by expert")
        order = expert_ids.flatten().argsort(stable=True)
        counts = torch.bincount(expert_ids.flatten(), minlength=len(gate_up)).tolist()
        chosen = x[torch.div(order, expert_ids.shape[1], rounding_mode="floor")]
        outputs = [
            self.linear(self.silu_mul(self.linear(rows, gate_up[expert], None)), down[expert], None)
            for expert, rows in enumerate(torch.split(chosen, counts))
            if len(rows)
        ]
        if not outputs:
            return torch.zeros_like(x)
        spread = torch.empty_like(chosen).index_copy_(0, order, torch.cat(outputs))
        weighted = spread.view(*expert_ids.shape, -1) * expert_weights.unsqueeze(-1)
        return weighted.sum(1).to(x.dtype)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        cache[target] = cache[source]

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
        torch.index_select(cache, 0, block_ids, out=staging)

    def scatter_blocks(self, staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
        cache[block_ids] = staging


def _attend_one(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence's new tokens, which are the last tokens of its context."""
    new, context = query.shape[0], key.shape[0]
    mask = None
    if 1 < new < context:
        mask = torch.ones(new, context, dtype=torch.bool).tril_(context - new)
    out = functional.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=1 < new == context,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _attend_latents(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    batch: AttentionBatch,
    scale: float,
    sequences: range,
    kv_scales: tuple[float, float],
) -> Tensor:
    refuse_capture("latent attention in plain torch")
    latent_dim = caches[0].shape[-1]
    out = query.new_empty(*query.shape[:2], latent_dim)
    start = 0
    for sequence in sequences:
        stop = start + batch.host_query_lens[sequence]
        context = batch.host_context_lens[sequence]
        blocks = batch.block_tables[sequence, : -(-context // batch.block_size)]
        planes = [cache.index_select(0, blocks).flatten(0, 2)[:context] for cache in caches]
        key = torch.cat(planes, dim=-1).float()
        if kv_scales != (1.0, 1.0):
            key[:, :latent_dim] *= kv_scales[0]
            key[:, latent_dim:] *= kv_scales[1]
        _attend_shared(query[start:stop], key, key[:, :latent_dim], scale, out[start:stop])
        start = stop
    return out


def _attend_shared(query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
    """Causal attention, in float32, of one sequence whose heads share all keys.

    The scores of several tokens and all heads are one matrix product. Tokens are processed in
    groups, to bound the memory for scores and to skip keys that a group does not see.
    """
    (new, heads, _), context = query.shape, key.shape[0]
    step = min(_MLA_TOKENS, max(1, _MLA_SCORES // (heads * context)))
    for start in range(0, new, step):
        count = min(step, new - start)
        first = context - new + start  # position of the group's first token
        seen = first + count
        rows = query[start : start + count].reshape(count * heads, -1).float()
        scores = (rows @ key[:seen].T).mul_(scale).view(count, heads, seen)
        if count > 1:
            hidden = torch.ones(count, seen, dtype=torch.bool).triu_(first + 1)
            scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
        weights = scores.softmax(-1).view(count * heads, seen)
        out[start : start + count] = (weights @ value[:seen]).view(count, heads, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


@cache
def _packed_dtypes() -> tuple[torch.dtype, ...]:
    """The types that oneDNN packs on this processor; bfloat16 needs AVX512 or AVX-NE-CONVERT."""
    if not _HAS_ONEDNN:
        return ()
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,)
