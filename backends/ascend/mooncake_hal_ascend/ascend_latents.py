"""Latent attention (MLA) over paged latents, in the absorbed form, and the writes of latents.

The attention op takes a power of two of heads and at most 16 query tokens per sequence; heads are
padded, and prompts are cut into chunks whose context ends at their last token.
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

MOST_TOKENS = 16
TILE = 16
"""Elements of a tile's row, in NZ, of two bytes each."""


class LatentFormat(NamedTuple):
    """How the blocks of a cache lie in memory.

    Args:
        is_nz: as tiles, ``[1, dim / 16, tokens, 16]``; else as rows, ``[tokens, 1, dim]``. Either
            way the tensor is ``[blocks, tokens, 1, dim]``.
        write_mode: the fused write's name for it.
        decode_layout: the attention op's, of one query token per sequence.
        token_dim: where that layout has the token, in queries ``[sequences, heads, dim]``.
    """

    is_nz: bool
    write_mode: str
    decode_layout: str
    token_dim: int

    def of(self, cache: Tensor) -> Tensor:
        """The cache as the attention op takes it."""
        blocks, tokens, heads, dim = cache.shape
        if self.is_nz:
            return cache.view(blocks, heads, dim // TILE, tokens, TILE)
        return cache.transpose(1, 2)  # one head: still dense


ROWS = LatentFormat(is_nz=False, write_mode="PA", decode_layout="BNSD_NBSD", token_dim=2)
NZ = LatentFormat(is_nz=True, write_mode="PA_NZ", decode_layout="BSND_NBSD", token_dim=1)


class AscendLatentOps:
    """Latent attention and its writes, over torch-npu's fused ops.

    Args:
        form: of the caches.
    """

    def __init__(self, form: LatentFormat = ROWS) -> None:
        self._form = form

    def pack_rope(self, rows: Tensor) -> Tensor:
        """The fused write rotates elements 0 and 1, 2 and 3, and so on, and
        stores halves."""
        return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)

    def write_latents(
        self,
        query: Tensor,
        rows: LatentRows,
        latent_cache: Tensor,
        rope_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """The fused write wants cosines and sines in the rows' own type."""
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
        latents, sequences = self._form.of(latent_cache), chunks_of(batch, MOST_TOKENS)
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
    """Turn blocks of rows, in place, into tiles."""
    rows = cache.index_select(0, block_ids)
    blocks, tokens, _, dim = rows.shape
    tiles = rows.view(blocks, tokens, dim // TILE, TILE).transpose(1, 2)
    cache.index_copy_(0, block_ids, tiles.reshape(rows.shape))


def _padded(heads: int) -> int:
    """The next power of two."""
    return 1 << (heads - 1).bit_length()


def _split(query: Tensor, latent_dim: int) -> tuple[Tensor, Tensor]:
    """Both parts of queries ``[n, heads, dim]``, dense, of a power of two of heads."""
    heads = query.shape[1]
    if missing := _padded(heads) - heads:
        query = functional.pad(query, (0, 0, 0, missing))
    return query[..., :latent_dim].contiguous(), query[..., latent_dim:].contiguous()


class RopeAngles(NamedTuple):
    """Cosines and sines of tokens' positions, for all elements: each [tokens, rotary_dim] float32,
    their second half like the first."""

    cos: Tensor
    sin: Tensor


def angles_of(positions: Tensor, cos_sin: Tensor) -> RopeAngles:
    """The rows of ``Ops.rope``'s table that the tokens take."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    return RopeAngles(torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


def rotated(rows: Tensor, angles: RopeAngles) -> Tensor:
    """Rows [tokens, heads, rotary_dim], rotated: in float32."""
    cos, sin = (each.view(1, len(rows), 1, rows.shape[-1]) for each in angles)
    found = torch_npu.npu_rotary_mul(rows.float().unsqueeze(0), cos, sin)
    return found[0]  # type: ignore[no-any-return]  # torch_npu has no types
