"""Latent attention (MLA) over paged latents, in the absorbed form, and writes of latents.

The attention op requires a power of two of heads and at most 16 query tokens per sequence. Heads
are padded, and prompts are divided into chunks whose context ends at their last token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from mooncake_hal.backend import AttentionBatch
from mooncake_hal.latents import LatentRows
from mooncake_hal_ascend.sequence_lengths import causal_mask, chunks_of, decodes_of

MAX_QUERY_TOKENS = 16
TILE = 16
"""Elements per row of a tile in the NZ format, for types of two bytes."""


class LatentFormat(NamedTuple):
    """The memory format of a cache's blocks.

    Args:
        is_nz: whether a block is stored as tiles, ``[1, dim / 16, tokens, 16]``, rather than as
            rows, ``[tokens, 1, dim]``. Either way the tensor is ``[blocks, tokens, 1, dim]``.
        write_mode: the fused write's name of the format.
        decode_layout: the attention op's input layout for one query token per sequence.
        token_dim: position of that layout's token dimension in queries ``[sequences, heads, dim]``.
    """

    is_nz: bool
    write_mode: str
    decode_layout: str
    token_dim: int

    def of(self, cache: Tensor) -> Tensor:
        """View the cache as the attention op expects it."""
        blocks, tokens, heads, dim = cache.shape
        if self.is_nz:
            return cache.view(blocks, heads, dim // TILE, tokens, TILE)
        return cache.transpose(1, 2)  # still dense, since there is one head


ROWS = LatentFormat(is_nz=False, write_mode="PA", decode_layout="BNSD_NBSD", token_dim=2)
NZ = LatentFormat(is_nz=True, write_mode="PA_NZ", decode_layout="BSND_NBSD", token_dim=1)


class AscendLatentOps:
    """Latent attention and writes of latents, with torch-npu's fused ops.

    Args:
        form: memory format of the caches.
    """

    def __init__(self, form: LatentFormat = ROWS) -> None:
        self._form = form

    def pack_rope(self, rows: Tensor) -> Tensor:
        """Interleave the halves: the fused write rotates pairs of adjacent elements (0 and 1, 2 and
        3, ...), and stores the results as halves."""
        return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)

    def write_latents(
        self,
        query: Tensor,
        rows: LatentRows,
        latent_cache: Tensor,
        rope_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Cosines and sines are converted to the rows' type, as the fused write requires."""
        if len(query) == 0:
            return query
        compressed, angles = rows.compressed, angles_of(rows.positions, rows.cos_sin)
        cos, sin = (each.to(compressed.dtype)[:, None, None] for each in angles)
        torch_npu.npu_kv_rmsnorm_rope_cache(
            compressed[:, None, None],
            rows.norm_weight,
            cos,
            sin,
            slot_mapping,
            rope_cache,
            latent_cache,
            epsilon=rows.eps,
            cache_mode=self._form.write_mode,
        )
        return rotated(query, angles).to(query.dtype)

    def mla_decode_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        heads, latent_dim = query.shape[1], latent_cache.shape[-1]
        if len(query) == 0:
            return query[..., :latent_dim]
        form, sequences = self._form, decodes_of(batch)
        latents = form.of(latent_cache)
        latent, rope = (each.unsqueeze(form.token_dim) for each in _split(query, latent_dim))
        found, _ = torch_npu.npu_fused_infer_attention_score_v2(
            latent,
            latents,
            latents,
            query_rope=rope,
            key_rope=form.of(rope_cache),
            actual_seq_kvlen=sequences.context_lens,
            block_table=sequences.block_table,
            num_query_heads=_padded(heads),
            num_key_value_heads=1,
            softmax_scale=scale,
            input_layout=form.decode_layout,
            sparse_mode=0,
            block_size=batch.block_size,
        )
        return found[:heads, :, 0].transpose(0, 1)  # type: ignore[no-any-return]  # no types

    def mla_prefill_attention(
        self,
        query: Tensor,
        latent_cache: Tensor,
        rope_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        heads, latent_dim = query.shape[1], latent_cache.shape[-1]
        if len(query) == 0:
            return query[..., :latent_dim]
        latents, sequences = self._form.of(latent_cache), chunks_of(batch, MAX_QUERY_TOKENS)
        has_several = len(sequences.query_ends) < len(query)
        latent, rope = _split(query, latent_dim)
        found, _ = torch_npu.npu_fused_infer_attention_score_v2(
            latent,
            latents,
            latents,
            query_rope=rope,
            key_rope=self._form.of(rope_cache),
            atten_mask=causal_mask(query.device) if has_several else None,
            actual_seq_qlen=sequences.query_ends,
            actual_seq_kvlen=sequences.context_lens,
            block_table=sequences.block_table,
            num_query_heads=_padded(heads),
            num_key_value_heads=1,
            softmax_scale=scale,
            input_layout="TND_NTD",
            sparse_mode=3 if has_several else 0,
            block_size=batch.block_size,
        )
        return found[:heads].transpose(0, 1)  # type: ignore[no-any-return]  # torch_npu has no types


def to_nz_blocks(cache: Tensor, block_ids: Tensor) -> None:
    """Convert blocks from rows to NZ tiles, in place."""
    rows = cache.index_select(0, block_ids)
    blocks, tokens, _, dim = rows.shape
    tiles = rows.view(blocks, tokens, dim // TILE, TILE).transpose(1, 2)
    cache.index_copy_(0, block_ids, tiles.reshape(rows.shape))


def _padded(heads: int) -> int:
    """The smallest power of two that is at least ``heads``."""
    return 1 << (heads - 1).bit_length()


def _split(query: Tensor, latent_dim: int) -> tuple[Tensor, Tensor]:
    """Split queries ``[n, heads, dim]`` into (latent, rope), dense, with heads padded to a power of
    two."""
    heads = query.shape[1]
    if missing := _padded(heads) - heads:
        query = functional.pad(query, (0, 0, 0, missing))
    return query[..., :latent_dim].contiguous(), query[..., latent_dim:].contiguous()


class RopeAngles(NamedTuple):
    """Cosines and sines of tokens' positions, for all elements: each [tokens, rotary_dim] float32,
    whose second half equals the first."""

    cos: Tensor
    sin: Tensor


def angles_of(positions: Tensor, cos_sin: Tensor) -> RopeAngles:
    """Look up the tokens' rows in the table of ``Ops.rope``."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    return RopeAngles(torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


def rotated(rows: Tensor, angles: RopeAngles) -> Tensor:
    """Rotate rows [tokens, heads, rotary_dim]; computes in and returns float32."""
    cos, sin = (each.view(1, len(rows), 1, rows.shape[-1]) for each in angles)
    found = torch_npu.npu_rotary_mul(rows.float().unsqueeze(0), cos, sin)
    return found[0]  # type: ignore[no-any-return]  # torch_npu has no types
