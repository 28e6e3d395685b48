"""Launches the attention kernels.

The number of programs depends on shapes, and for prompts on the host's copy of the lengths, but
for decodes never on lengths: a captured decode step stays right as contexts grow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mooncake_hal.backend import AttentionBatch
from mooncake_hal.errors import DeviceError
from mooncake_hal_cuda.kernels.attention_parts import merge_splits
from mooncake_hal_cuda.kernels.latent_attention import latent_attention
from mooncake_hal_cuda.kernels.paged_attention import paged_attention
from mooncake_hal_cuda.launch_tuning import (
    AttentionTile,
    Splitting,
    Tuning,
    power_of_two,
)

_LOG2_E = math.log2(math.e)
_MIN_SPLIT = 256
# a split of latents writes a row of sums for every head: the more heads, the longer it has to be
_MIN_LATENT_SPLIT_PER_HEAD = 8
_MIN_DOT = 16
_LEAST_ARRIVALS = 4096


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of an attention op.

    Args:
        query: [tokens, heads, dim] of the call's sequences.
        caches: key and value, or latent and rope.
        batch: all sequences.
        scale: of the scores.
        kv_scales: of the caches, in their order.
        first: the call's first sequence in the batch; 0 for decodes.
        new_tokens: the most that any of them has.
        sequences: how many there are.
        is_decode: whether it is the op for decodes. The last token of a prompt, alone in its
            chunk, is none: its result would depend on whether longer prompts came with it.
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
    ) -> AttentionCall:
        """The batch's leading sequences, of one new token each."""
        query = dense_rows(query)
        return cls(query, caches, batch, scale, kv_scales, 0, 1, query.shape[0], True)

    @classmethod
    def of_prompts(
        cls,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        scale: float,
        kv_scales: tuple[float, float],
    ) -> AttentionCall:
        """The sequences after the decodes."""
        query, first = dense_rows(query), batch.num_decodes
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


@dataclass(frozen=True, slots=True)
class _Launch:
    """How a call is launched.

    Args:
        tile: of a program.
        splitting: how a context is cut.
        splits: that the launch has room for.
    """

    tile: AttentionTile
    splitting: Splitting
    splits: int

    def options(self, call: AttentionCall) -> dict[str, int | str | bool | None]:
        """The kernel's compile-time arguments that do not depend on what is attended to."""
        return {
            "BLOCK_SIZE": call.batch.block_size,
            "ROWS": self.tile.rows,
            "TOKENS": self.tile.tokens,
            "IS_SPLIT": call.is_decode,  # of short contexts, too: one kernel for all decodes
            "MIN_SPLIT": self.splitting.min_tokens,
            "MAX_SPLITS": self.splitting.most,
            "PRECISION": call.precision,
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
            "maxnreg": self.tile.registers,
        }


def attend_grouped(call: AttentionCall, tuning: Tuning) -> Tensor:
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
        launch = _Launch(tile, splitting, splitting.count(call.capacity))
    else:
        launch = _Launch(tuning.prefill(dim, size, kv_size), Splitting(_MIN_SPLIT, 1), 1)
    row_blocks = -(-call.new_tokens * group // launch.tile.rows)
    shares = row_blocks * kv_heads * call.sequences
    programs, least = tuning.programs(launch.splits, shares), tuning.least_splits(shares)
    parts, weights, arrivals = out, out, out
    if call.is_decode:
        parts, weights = _split_buffers(out, launch.splits)
        arrivals = _arrivals(shares, out.device)
    paged_attention[(row_blocks * programs, kv_heads, call.sequences)](
        out,
        parts,
        weights,
        arrivals,
        call.query,
        key,
        value,
        call.batch.block_tables,
        call.batch.context_lens,
        call.batch.query_start,
        call.first,
        call.batch.block_tables.stride(0),
        call.scale * call.kv_scales[0] * _LOG2_E,
        launch.splits,
        programs,
        least,
        call.kv_scales[1],
        call.query.stride()[:2],
        key.stride()[:3],
        value.stride()[:3],
        HEADS=heads,
        GROUP=group,
        DIM=dim,
        DIM_PADDED=max(_MIN_DOT, power_of_two(dim)),
        MERGED_ROWS=min(launch.tile.rows, power_of_two(group)),
        IS_AHEAD=tuning.has_early_launches,
        **launch.options(call),
    )
    return out


def attend_latent(call: AttentionCall, tuning: Tuning) -> Tensor:
    """Attention over latents: [tokens, heads, latent dim]."""
    latent, rope = call.caches
    tokens, heads, _ = call.query.shape
    dim, rope_dim = latent.shape[3], rope.shape[3]
    out = torch.empty((tokens, heads, dim), dtype=call.query.dtype, device=latent.device)
    if tokens == 0:
        return out
    tile = tuning.latent(call.new_tokens * heads, call.query.element_size(), latent.element_size())
    least = max(_MIN_SPLIT, _MIN_LATENT_SPLIT_PER_HEAD * power_of_two(heads))
    splitting = Splitting(least, 1)
    if call.is_decode:
        splitting = tuning.splitting(-(-heads // tile.rows), least)
    launch = _Launch(tile, splitting, splitting.count(call.capacity))
    parts, weights = _split_buffers(out, launch.splits) if call.is_decode else (out, out)
    row_blocks = -(-call.new_tokens * heads // tile.rows)
    programs = tuning.programs(launch.splits, row_blocks * call.sequences)
    query = _with_rope_scale(call)
    latent_attention[(row_blocks * programs, call.sequences)](
        out,
        parts,
        weights,
        query,
        latent,
        rope,
        call.batch.block_tables,
        call.batch.context_lens,
        call.batch.query_start,
        call.first,
        call.batch.block_tables.stride(0),
        call.scale * call.kv_scales[0] * _LOG2_E,
        launch.splits,
        programs,
        call.kv_scales[0],
        query.stride()[:2],
        latent.stride()[:2] + rope.stride()[:2],
        HEADS=heads,
        LATENT=dim,
        LATENT_PADDED=max(_MIN_DOT, power_of_two(dim)),
        ROPE=rope_dim,
        ROPE_PADDED=max(_MIN_DOT, power_of_two(rope_dim)),
        **launch.options(call),
    )
    return out if launch.splits == 1 else _merge(out, parts, weights, call, launch)


def _with_rope_scale(call: AttentionCall) -> Tensor:
    """The queries, where planes have scales of their own: the kernel applies the latents' to all
    scores, so what meets the rope rows is multiplied by the ratio of the two beforehand."""
    ratio, rope_dim = call.kv_scales[1] / call.kv_scales[0], call.caches[1].shape[3]
    if ratio == 1.0:
        return call.query
    query = call.query.clone()
    query[..., -rope_dim:] *= ratio
    return query


def _split_buffers(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Where decodes write what is merged: partial results and their weights."""
    tokens, heads, dim = out.shape
    parts = torch.empty((tokens, splits, heads, dim), dtype=torch.float32, device=out.device)
    return parts, torch.empty(parts.shape[:3], dtype=torch.float32, device=out.device)


def _arrivals(count: int, device: torch.device) -> Tensor:
    """Zeros in which the programs of a launch count themselves, and which they leave as zeros.

    Launches that run at the same time need their own, so each stream has; a graph has those of the
    stream on which it was captured, which all of them share: no two are replayed at once, as they
    share memory anyway.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _zeros(max(_LEAST_ARRIVALS, power_of_two(count)), device, stream)


@cache
def _zeros(count: int, device: torch.device, stream: int) -> Tensor:
    """Made once for good: a graph would fill what is made in its capture, at each replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"attention of {count} programs was captured on a stream that has not run it: run a "
            "step on the stream that captures it first, as the runtime's capture does"
        )
    return torch.zeros(count, dtype=torch.int32, device=device)


def _merge(
    out: Tensor, parts: Tensor, weights: Tensor, call: AttentionCall, launch: _Launch
) -> Tensor:
    """Sum the splits up in ``out``, which is returned; rows of one split are there already."""
    tokens, heads, dim = out.shape
    merge_splits[(tokens, heads)](
        out,
        parts,
        weights,
        call.batch.context_lens,
        launch.splits,
        HEADS=heads,
        DIM=dim,
        DIM_PADDED=power_of_two(dim),
        TOKENS=launch.tile.tokens,
        MIN_SPLIT=launch.splitting.min_tokens,
        MAX_SPLITS=launch.splitting.most,
        num_warps=4 if dim > 128 else 1,
    )
    return out


def dense_rows(x: Tensor) -> Tensor:
    """The tensor, copied if its last dimension is not dense."""
    return x if x.stride(-1) == 1 else x.contiguous()
