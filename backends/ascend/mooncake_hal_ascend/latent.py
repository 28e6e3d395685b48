"""Latent attention (MLA) over paged latents, in the absorbed form.

The op takes a power of two of heads and at most 16 query tokens per sequence; heads are padded,
and prompts cut into pieces that each see what their last token sees.
"""

from __future__ import annotations

import torch_npu
from torch import Tensor
from torch.nn import functional

from mooncake_hal.backend import AttentionBatch
from mooncake_hal_ascend.sequences import causal_mask, decodes_of, pieces_of

MOST_TOKENS = 16


def attend_decodes(
    query: Tensor,  # [sequences, heads, latent + rope]
    caches: tuple[Tensor, Tensor],  # [blocks, tokens, 1, latent or rope], dense
    batch: AttentionBatch,
    scale: float,
) -> Tensor:  # [sequences, heads, latent]
    """Attention of the batch's leading decodes."""
    latent_cache, rope_cache = (cache.transpose(1, 2) for cache in caches)  # one head: still dense
    sequences, heads = decodes_of(batch), query.shape[1]
    if len(query) == 0:
        return query[..., : latent_cache.shape[-1]]
    latent, rope = _split(query.unsqueeze(2), latent_cache.shape[-1])
    found, _ = torch_npu.npu_fused_infer_attention_score_v2(
        latent,
        latent_cache,
        latent_cache,
        query_rope=rope,
        key_rope=rope_cache,
        actual_seq_kvlen=sequences.context_lens,
        block_table=sequences.block_table,
        num_query_heads=latent.shape[1],
        num_key_value_heads=1,
        softmax_scale=scale,
        input_layout="BNSD_NBSD",
        sparse_mode=0,
        block_size=latent_cache.shape[2],
    )
    return found[:heads, :, 0].transpose(0, 1)  # type: ignore[no-any-return]  # no types


def attend_prompts(
    query: Tensor,  # [tokens, heads, latent + rope]
    caches: tuple[Tensor, Tensor],
    batch: AttentionBatch,
    scale: float,
) -> Tensor:  # [tokens, heads, latent]
    """Causal attention of the sequences after the decodes."""
    latent_cache, rope_cache = (cache.transpose(1, 2) for cache in caches)
    heads = query.shape[1]
    if len(query) == 0:
        return query[..., : latent_cache.shape[-1]]
    sequences = pieces_of(batch, MOST_TOKENS)
    has_several = len(sequences.query_ends) < len(query)
    latent, rope = _split(query, latent_cache.shape[-1])
    found, _ = torch_npu.npu_fused_infer_attention_score_v2(
        latent,
        latent_cache,
        latent_cache,
        query_rope=rope,
        key_rope=rope_cache,
        atten_mask=causal_mask(query.device) if has_several else None,
        actual_seq_qlen=sequences.query_ends,
        actual_seq_kvlen=sequences.context_lens,
        block_table=sequences.block_table,
        num_query_heads=latent.shape[1],
        num_key_value_heads=1,
        softmax_scale=scale,
        input_layout="TND_NTD",
        sparse_mode=3 if has_several else 0,
        block_size=latent_cache.shape[2],
    )
    return found[:heads].transpose(0, 1)  # type: ignore[no-any-return]  # torch_npu has no types


def _split(query: Tensor, latent_dim: int) -> tuple[Tensor, Tensor]:
    """Both parts of queries ``[n, heads, ...]``, dense, of a power of two of heads."""
    heads = query.shape[1]
    missing = (1 << (heads - 1).bit_length()) - heads
    if missing:
        query = functional.pad(query, (0, 0) * (query.dim() - 2) + (0, missing))
    return query[..., :latent_dim].contiguous(), query[..., latent_dim:].contiguous()
