"""Launches of the attention kernels.

The number of programs depends on shapes, and for prompts on the host's copy of the lengths, but
for decodes never on lengths: a captured decode step stays right as contexts grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_hal.backend import AttentionBatch
from mooncake_hal_cuda.kernels.latent_attention import latent_attention
from mooncake_hal_cuda.kernels.merge_splits import merge_splits
from mooncake_hal_cuda.kernels.paged_attention import paged_attention
from mooncake_hal_cuda.tuning import MOST_REGISTERS, AttentionTile, Splitting, Tuning, power_of_two

_LOG2_E = math.log2(math.e)
_MIN_SPLIT = 256
# a split of latents writes a row of sums for every head: the more heads, the longer it has to be
_MIN_LATENT_SPLIT_PER_HEAD = 8
_MIN_DOT = 16


@dataclass(frozen=True, slots=True)
class Attention:
    """One call of an attention op.

    Args:
        query: [tokens, heads, dim] of the sequences in question.
        caches: key and value, or latent and rope.
        batch: all sequences.
        scale: of the scores.
        kv_scales: of the caches, in their order.
        first: the first sequence in question; for decodes 0.
        new_tokens: the most that any of them has.
        sequences: how many there are.
        is_decode: whether it is the op for decodes. A prompt's last token alone is none: its
            result would depend on whether longer prompts came with it.
    """

    query: Tensor
    caches: tuple[Tensor, Tensor]
    batch: AttentionBatch
    scale: float
    kv_scales: tuple[float, float]
    first: int
    new_tokens: int
    sequences: int
    is_decode: bool

    @classmethod
    def of_decodes(
        cls,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        scale: float,
        kv_scales: tuple[float, float],
    ) -> Attention:
        """The batch's leading sequences, of one new token each."""
        query = _dense_heads(query)
        return cls(query, caches, batch, scale, kv_scales, 0, 1, query.shape[0], True)

    @classmethod
    def of_prompts(
        cls,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        scale: float,
        kv_scales: tuple[float, float],
    ) -> Attention:
        """All the others."""
        query, first = _dense_heads(query), batch.num_decodes
        lengths = batch.host_query_lens[first:]
        longest = max(lengths, default=0)
        return cls(query, caches, batch, scale, kv_scales, first, longest, len(lengths), False)

    @property
    def capacity(self) -> int:
        """The longest context that the block tables have room for."""
        return int(self.batch.block_tables.shape[1]) * self.batch.block_size

    @property
    def precision(self) -> str:
        """Of matrix products: float32 is not cut to tf32."""
        return "ieee" if self.query.dtype is torch.float32 else "tf32"


def attend_grouped(call: Attention, tuning: Tuning) -> Tensor:
    """Attention with grouped heads: [tokens, heads, value dim]."""
    key, value = call.caches
    tokens, heads, dim = call.query.shape
    out = torch.empty((tokens, heads, value.shape[3]), dtype=call.query.dtype, device=key.device)
    if tokens == 0:
        return out
    kv_heads, size, kv_size = key.shape[2], call.query.element_size(), key.element_size()
    group = heads // kv_heads
    if call.is_decode:
        tile = tuning.decode(group, dim, size, kv_size)
        splitting = tuning.splitting(kv_heads * -(-group // tile.rows), _MIN_SPLIT)
        splits = splitting.count(call.capacity)
    else:
        tile, splitting, splits = tuning.prefill(dim, size, kv_size), Splitting(_MIN_SPLIT, 1), 1
    target, weights = _split_buffers(out, splits)
    row_blocks = -(-call.new_tokens * group // tile.rows)
    programs = tuning.programs(splits, row_blocks * kv_heads * call.sequences)
    grid = (row_blocks * programs, kv_heads, call.sequences)
    paged_attention[grid](
        target,
        weights,
        call.query,
        key,
        value,
        *_lengths(call),
        splits,
        programs,
        call.kv_scales[1],
        call.query.stride()[:2],
        key.stride()[:3],
        value.stride()[:3],
        HEADS=heads,
        GROUP=group,
        DIM=dim,
        DIM_PADDED=max(_MIN_DOT, power_of_two(dim)),
        **_launch(call, tile, splitting, splits),
    )
    return _merged(out, target, weights, call, (tile, splitting, splits))


def attend_latent(call: Attention, tuning: Tuning) -> Tensor:
    """Attention over latents: [tokens, heads, latent dim]."""
    latent, rope = call.caches
    tokens, heads, _ = call.query.shape
    dim, rope_dim = latent.shape[3], rope.shape[3]
    out = torch.empty((tokens, heads, dim), dtype=call.query.dtype, device=latent.device)
    if tokens == 0:
        return out
    sizes = (call.query.element_size(), latent.element_size())
    tile = tuning.latent(call.new_tokens * heads, *sizes)
    least = max(_MIN_SPLIT, _MIN_LATENT_SPLIT_PER_HEAD * power_of_two(heads))
    splitting = Splitting(least, 1)
    if call.is_decode:
        splitting = tuning.splitting(-(-heads // tile.rows), least)
    splits = splitting.count(call.capacity)
    target, weights = _split_buffers(out, splits)
    row_blocks = -(-call.new_tokens * heads // tile.rows)
    programs = tuning.programs(splits, row_blocks * call.sequences)
    grid = (row_blocks * programs, call.sequences)
    query = _with_rope_scale(call)
    latent_attention[grid](
        target,
        weights,
        query,
        latent,
        rope,
        *_lengths(call),
        splits,
        programs,
        call.kv_scales[0],
        query.stride()[:2],
        latent.stride()[:2] + rope.stride()[:2],
        HEADS=heads,
        LATENT=dim,
        LATENT_PADDED=max(_MIN_DOT, power_of_two(dim)),
        ROPE=rope_dim,
        ROPE_PADDED=max(_MIN_DOT, power_of_two(rope_dim)),
        **_launch(call, tile, splitting, splits),
    )
    return _merged(out, target, weights, call, (tile, splitting, splits))


def _with_rope_scale(call: Attention) -> Tensor:
    """The queries, what meets the rope rows multiplied by how much their scale is another one."""
    ratio, rope_dim = call.kv_scales[1] / call.kv_scales[0], call.caches[1].shape[3]
    if ratio == 1.0:
        return call.query
    query = call.query.clone()
    query[..., -rope_dim:] *= ratio
    return query


def _lengths(call: Attention) -> tuple[Tensor | int | float, ...]:
    """The arguments about sequences that both kernels take, in their order."""
    batch = call.batch
    return (
        batch.block_tables,
        batch.context_lens,
        batch.query_start,
        call.first,
        batch.block_tables.stride(0),
        call.scale * call.kv_scales[0] * _LOG2_E,
    )


def _launch(
    call: Attention, tile: AttentionTile, splitting: Splitting, splits: int
) -> dict[str, int | str | bool | None]:
    return {
        "BLOCK_SIZE": call.batch.block_size,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "IS_SPLIT": splits > 1,
        "MIN_SPLIT": splitting.min_tokens,
        "MAX_SPLITS": splitting.most,
        "PRECISION": call.precision,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": MOST_REGISTERS if call.precision == "ieee" else None,
    }


def _split_buffers(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Where the kernel writes: ``out`` itself, or partial results and their weights."""
    if splits == 1:
        return out, out
    tokens, heads, dim = out.shape
    parts = torch.empty((tokens, splits, heads, dim), dtype=torch.float32, device=out.device)
    return parts, torch.empty(parts.shape[:3], dtype=torch.float32, device=out.device)


def _merged(
    out: Tensor,
    parts: Tensor,
    weights: Tensor,
    call: Attention,
    cut: tuple[AttentionTile, Splitting, int],
) -> Tensor:
    tile, splitting, splits = cut
    if splits == 1:
        return out
    tokens, heads, dim = out.shape
    merge_splits[(tokens, heads)](
        out,
        parts,
        weights,
        call.batch.context_lens,
        splits,
        HEADS=heads,
        DIM=dim,
        DIM_PADDED=power_of_two(dim),
        TOKENS=tile.tokens,
        MIN_SPLIT=splitting.min_tokens,
        MAX_SPLITS=splitting.most,
        num_warps=4 if dim > 128 else 1,
    )
    return out


def _dense_heads(query: Tensor) -> Tensor:
    return query if query.stride(2) == 1 else query.contiguous()
