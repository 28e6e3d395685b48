"""The reference ops: only their arithmetic is slow."""

from __future__ import annotations

import torch

from mooncake_hal.backend import AttentionBatch
from mooncake_hal.reference import ReferenceOps


def test_attention_reads_only_the_blocks_of_its_sequences() -> None:
    """The pool has 2^40 blocks on the same memory: no host could convert or copy it as a whole."""
    pool = torch.ones(1, 4, 1, 8).expand(1 << 40, 4, 1, 8)
    batch = AttentionBatch(
        num_decodes=1,
        query_start=torch.tensor([0, 1, 3], dtype=torch.int32),
        context_lens=torch.tensor([5, 2], dtype=torch.int32),
        block_tables=torch.tensor([[1, 2], [3, 3]], dtype=torch.int32),
        slot_mapping=torch.zeros(3, dtype=torch.int64),
        block_size=4,
        host_query_lens=(1, 2),
        host_context_lens=(5, 2),
    )
    ops, query = ReferenceOps().with_kv_scales(1.0, 2.0), torch.ones(1, 2, 8)
    assert torch.equal(ops.decode_attention(query, pool, pool, batch, 1.0), 2 * query)
    latent_query = torch.ones(2, 2, 16)
    attended = ops.mla_prefill_attention(latent_query, pool, pool, batch, 1.0)
    assert torch.equal(attended, torch.ones(2, 2, 8))
