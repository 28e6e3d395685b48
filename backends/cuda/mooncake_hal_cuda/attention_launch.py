"""Launches the attention kernels.

The number of programs in a launch depends on tensor shapes, and for prompts also on the host's copy
of the sequence lengths. For decodes it never depends on lengths, so that a captured decode step
stays correct as contexts grow.
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
from mooncake_hal_cuda.kernels.decode_attention import decode_attention
from mooncake_hal_cuda.kernels.latent_attention import latent_attention
from mooncake_hal_cuda.kernels.prefill_attention import prefill_attention
from mooncake_hal_cuda.launch_tuning import (
    AttentionTile,
    Splitting,
    Tuning,
    power_of_two,
)

_LOG2_E = math.log2(math.e)
_MIN_SPLIT = 256
# a split of latents writes a row of partial sums per head: with more heads, splits must be longer
# for the reads to outweigh those writes
_MIN_LATENT_SPLIT_PER_HEAD = 8
_MIN_DOT = 16
_MIN_COUNTERS = 4096


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of an attention op.

    Args:
        query: [tokens, heads, dim] queries of the call's sequences.
        caches: (key, value) or (latent, rope) caches.
        batch: metadata of all sequences of the step.
        scale: softmax scale of the scores.
        kv_scales: quantisation scales of ``caches``, in the same order.
        first: index in the batch of the call's first sequence; 0 for decodes.
        new_tokens: the largest number of new tokens of any of the call's sequences.
        sequences: number of sequences in the call.
        is_decode: whether this is a call of the decode op. A prompt's last token that is alone in
            its chunk is not a decode: its result would depend on whether longer prompts were
            scheduled with it.
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
        """A call for the batch's leading sequences, which have one new token each."""
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
        """A call for the sequences behind the batch's decodes."""
        query, first = dense_rows(query), batch.num_decodes
        lengths = batch.host_query_lens[first:]
        longest = max(lengths, default=0)
        return cls(query, caches, batch, scale, kv_scales, first, longest, len(lengths), False)

    @property
    def capacity(self) -> int:
        """The longest context that the block tables can describe, in tokens."""
        return int(self.batch.block_tables.shape[1]) * self.batch.block_size

    @property
    def group(self) -> int:
        """Query heads per KV head of grouped-head attention."""
        return int(self.query.shape[1] // self.caches[0].shape[2])

    @property
    def precision(self) -> str:
        """Precision of the matrix products: float32 is not rounded to tf32."""
        return "ieee" if self.query.dtype is torch.float32 else "tf32"


def _tile_options(tile: AttentionTile, call: AttentionCall) -> dict[str, int | str | None]:
    """The compile-time arguments that all attention kernels have in common."""
    return {
        "BLOCK_SIZE": call.batch.block_size,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "PRECISION": call.precision,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "maxnreg": tile.registers,
    }


def _grouped_options(tile: AttentionTile, call: AttentionCall) -> dict[str, int | str | None]:
    """Those of grouped-head attention."""
    _, heads, dim = call.query.shape
    return {
        "HEADS": heads,
        "GROUP": call.group,
        "DIM": dim,
        "DIM_PADDED": max(_MIN_DOT, power_of_two(dim)),
        **_tile_options(tile, call),
    }


def attend_grouped(call: AttentionCall, tuning: Tuning) -> Tensor:
    """Grouped-head attention; returns [tokens, heads, value dim]."""
    value = call.caches[1]
    tokens, heads, _ = call.query.shape
    out = torch.empty((tokens, heads, value.shape[3]), dtype=call.query.dtype, device=value.device)
    if tokens == 0:
        return out
    attend = _attend_decodes if call.is_decode else _attend_prompts
    attend(out, call, tuning)
    return out


def _attend_decodes(out: Tensor, call: AttentionCall, tuning: Tuning) -> None:
    key, value = call.caches
    sequences, _, dim = call.query.shape
    kv_heads, group = key.shape[2], call.group
    tile = tuning.decode(group, dim, call.query.element_size(), key.element_size())
    row_blocks = -(-group // tile.rows)
    splitting = tuning.splitting(kv_heads * row_blocks, _MIN_SPLIT)
    splits = splitting.count(call.capacity)
    num_row_blocks = row_blocks * kv_heads * sequences
    programs = tuning.programs(splits, num_row_blocks, tile)
    decode_attention[(row_blocks, kv_heads, sequences * programs)](
        out,
        *_split_buffers(out, splits),
        _arrivals(num_row_blocks, out.device),
        call.query,
        key,
        value,
        call.batch.block_tables,
        call.batch.context_lens,
        call.batch.block_tables.stride(0),
        call.scale * call.kv_scales[0] * _LOG2_E,
        splits,
        programs,
        tuning.min_splits(num_row_blocks, tile),
        call.kv_scales[1],
        call.query.stride()[:2],
        key.stride()[:3],
        value.stride()[:3],
        KEPT_ROWS=min(tile.rows, power_of_two(group)),
        MIN_SPLIT=splitting.min_tokens,
        MAX_SPLITS=splitting.max_splits,
        IS_EARLY=tuning.has_early_launches,
        **_grouped_options(tile, call),
        **tuning.early_launch(sequences),
    )


def _attend_prompts(out: Tensor, call: AttentionCall, tuning: Tuning) -> None:
    key, value = call.caches
    tile = tuning.prefill(call.query.shape[2], call.query.element_size(), key.element_size())
    row_blocks = -(-call.new_tokens * call.group // tile.rows)
    prefill_attention[(row_blocks, key.shape[2], call.sequences)](
        out,
        call.query,
        key,
        value,
        call.batch.block_tables,
        call.batch.context_lens,
        call.batch.query_start,
        call.first,
        call.batch.block_tables.stride(0),
        call.scale * call.kv_scales[0] * _LOG2_E,
        call.kv_scales[1],
        call.query.stride()[:2],
        key.stride()[:3],
        value.stride()[:3],
        **_grouped_options(tile, call),
    )


def attend_latent(call: AttentionCall, tuning: Tuning) -> Tensor:
    """Attention over MLA latents; returns [tokens, heads, latent dim]."""
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
    splits = splitting.count(call.capacity)
    parts, weights = _split_buffers(out, splits) if call.is_decode else (out, out)
    row_blocks = -(-call.new_tokens * heads // tile.rows)
    programs = tuning.programs(splits, row_blocks * call.sequences, tile)
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
        IS_SPLIT=call.is_decode,  # even for short contexts: one kernel for all decodes
        MIN_SPLIT=splitting.min_tokens,
        MAX_SPLITS=splitting.max_splits,
        **_tile_options(tile, call),
    )
    if splits > 1:
        _merge(out, parts, weights, call.batch.context_lens, splitting, tile.tokens)
    return out


def _with_rope_scale(call: AttentionCall) -> Tensor:
    """The call's queries, with their rope dimensions multiplied by the ratio of the two KV scales.

    The kernel applies the latents' scale to whole scores. Where the rope plane has another scale,
    this ratio corrects the rope part of each score.
    """
    ratio, rope_dim = call.kv_scales[1] / call.kv_scales[0], call.caches[1].shape[3]
    if ratio == 1.0:
        return call.query
    query = call.query.clone()
    query[..., -rope_dim:] *= ratio
    return query


def _split_buffers(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Buffers for the partial results of a decode's splits and for their weights."""
    tokens, heads, dim = out.shape
    parts = torch.empty((tokens, splits, heads, dim), dtype=torch.float32, device=out.device)
    return parts, torch.empty(parts.shape[:3], dtype=torch.float32, device=out.device)


def _arrivals(count: int, device: torch.device) -> Tensor:
    """Zeroed counters with which the programs of a launch find out which of them is the last; the
    launch leaves them zeroed.

    Launches that run concurrently need separate counters, so each stream has its own. All graphs
    captured on one stream share that stream's counters, which is safe because graphs that share a
    memory pool are never replayed concurrently.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _zeros(max(_MIN_COUNTERS, power_of_two(count)), device, stream)


@cache
def _zeros(count: int, device: torch.device, stream: int) -> Tensor:
    """Allocated once and kept: zeros allocated during a capture would be filled at each replay."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            f"attention of {count} programs was captured on a stream that has not run it: run a "
            "step on the stream that captures it first, as the runtime's capture does"
        )
    return torch.zeros(count, dtype=torch.int32, device=device)


def _merge(
    out: Tensor,
    parts: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    splitting: Splitting,
    tile_tokens: int,
) -> None:
    """Merge the splits into ``out``; rows with a single split are already final."""
    tokens, splits, heads, dim = parts.shape
    merge_splits[(tokens, heads)](
        out,
        parts,
        weights,
        context_lens,
        splits,
        HEADS=heads,
        DIM=dim,
        DIM_PADDED=power_of_two(dim),
        TOKENS=tile_tokens,
        MIN_SPLIT=splitting.min_tokens,
        MAX_SPLITS=splitting.max_splits,
        num_warps=4 if dim > 128 else 1,
    )


def dense_rows(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy if its last dimension is not dense."""
    return x if x.stride(-1) == 1 else x.contiguous()
