"""Host-side sequence lengths that attention ops receive for decodes, prompts and prompt chunks."""

from __future__ import annotations

import torch

from mooncake_hal.backend import AttentionBatch
from mooncake_hal_ascend.sequence_lengths import causal_mask, chunks_of, decodes_of, prompts_of


def batch_of(*lengths: tuple[int, int], num_decodes: int) -> AttentionBatch:
    """A batch of (query, context) lengths; the table of sequence i holds block i."""
    queries, contexts = zip(*lengths, strict=True)
    return AttentionBatch(
        num_decodes,
        torch.tensor([0, *queries]).cumsum(0).int(),
        torch.tensor(contexts, dtype=torch.int32),
        torch.arange(len(lengths), dtype=torch.int32).unsqueeze(1),
        torch.arange(sum(queries)),
        128,
        queries,
        contexts,
    )


MIXED = batch_of((1, 5), (1, 90), (3, 3), (40, 100), num_decodes=2)


def test_decodes_have_their_lengths() -> None:
    found = decodes_of(MIXED)
    assert (found.query_ends, found.context_lens) == ([1, 2], [5, 90])
    assert found.block_table.tolist() == [[0], [1]]


def test_prompts_have_their_lengths() -> None:
    found = prompts_of(MIXED)
    assert (found.query_ends, found.context_lens) == ([3, 43], [3, 100])
    assert found.block_table.tolist() == [[2], [3]]


def test_chunks_end_at_the_context_of_their_last_token() -> None:
    found = chunks_of(MIXED, 16)
    assert found.query_ends == [3, 19, 35, 43]
    assert found.context_lens == [3, 76, 92, 100]
    assert found.block_table.tolist() == [[2], [3], [3], [3]]


def test_lengths_are_cached_per_batch() -> None:
    assert chunks_of(MIXED, 16) is chunks_of(MIXED, 16)
    assert prompts_of(batch_of((2, 2), num_decodes=0)) is not prompts_of(MIXED)


def test_causal_mask_hides_later_tokens() -> None:
    mask = causal_mask(torch.device("cpu"))
    assert mask.dtype == torch.int8
    assert torch.equal(mask.bool(), torch.ones(2048, 2048).triu(1).bool())
