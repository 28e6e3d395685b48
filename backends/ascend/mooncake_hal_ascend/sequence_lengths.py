"""Sequence lengths as the host lists that attention ops expect, built once per batch and not per
layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from mooncake_hal.backend import AttentionBatch

_MASK = 2048
"""Rows and columns of the causal mask, which the ops apply to any length (sparse_mode 3)."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLengths:
    """Lengths of some sequences of a batch, for the input layout TND.

    Args:
        query_ends: cumulative sum of the query lengths.
        context_lens: number of KV tokens of each sequence.
        block_table: [sequences, blocks] int32.
    """

    query_ends: list[int]
    context_lens: list[int]
    block_table: Tensor


@lru_cache(maxsize=2)
def decodes_of(batch: AttentionBatch) -> SequenceLengths:
    """Lengths of the decodes, the batch's leading sequences with one query token each."""
    count = batch.num_decodes
    lengths = list(batch.host_context_lens[:count])
    return SequenceLengths(list(range(1, count + 1)), lengths, batch.block_tables[:count])


@lru_cache(maxsize=2)
def prompts_of(batch: AttentionBatch) -> SequenceLengths:
    """Lengths of the prompts, the sequences behind the decodes."""
    count = batch.num_decodes
    ends = list(accumulate(batch.host_query_lens[count:]))
    return SequenceLengths(ends, list(batch.host_context_lens[count:]), batch.block_tables[count:])


@lru_cache(maxsize=2)
def chunks_of(batch: AttentionBatch, max_tokens: int) -> SequenceLengths:
    """Lengths of the prompts, divided into chunks of at most ``max_tokens`` query tokens.

    Each chunk is a sequence whose context ends at the chunk's last token.
    """
    rows, lengths, contexts = [], [], []
    for row in range(batch.num_decodes, len(batch.host_query_lens)):
        query, context = batch.host_query_lens[row], batch.host_context_lens[row]
        for start in range(0, query, max_tokens):
            stop = min(start + max_tokens, query)
            rows.append(row)
            lengths.append(stop - start)
            contexts.append(context - query + stop)
    table = batch.block_tables[torch.tensor(rows, device=batch.block_tables.device)]
    return SequenceLengths(list(accumulate(lengths)), contexts, table)


@lru_cache
def causal_mask(device: torch.device) -> Tensor:
    """The causal mask, [2048, 2048] int8: 1 where a token must not see a later token."""
    return torch.ones(_MASK, _MASK, dtype=torch.int8, device=device).triu_(1)
