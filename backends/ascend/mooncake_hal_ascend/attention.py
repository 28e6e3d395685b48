"""Grouped-query attention over paged KV.

Everything is one form of one op: new tokens are already in the cache when attention runs, so a
prompt without a cached prefix, with one, and a chunk of one differ in their lengths alone.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from mooncake_hal_ascend.sequences import Sequences, causal_mask


def attend(
    query: Tensor,  # [tokens, heads, head_dim]
    caches: tuple[Tensor, Tensor],  # [blocks, tokens, kv heads, head_dim], dense
    sequences: Sequences,
    scale: float,
) -> Tensor:
    """Causal attention of the sequences' new tokens: [tokens, heads, head_dim]."""
    if len(query) == 0:
        return torch.empty_like(query)
    key, value = caches
    found, _ = torch_npu.npu_fused_infer_attention_score(
        query.contiguous(),
        key.flatten(2),
        value.flatten(2),
        atten_mask=causal_mask(query.device),
        actual_seq_lengths=sequences.query_ends,
        actual_seq_lengths_kv=sequences.context_lens,
        block_table=sequences.block_table,
        num_heads=query.shape[1],
        scale=scale,
        input_layout="TND",
        num_key_value_heads=key.shape[2],
        sparse_mode=3,
        block_size=key.shape[1],
    )
    return found  # type: ignore[no-any-return]  # torch_npu has no types
