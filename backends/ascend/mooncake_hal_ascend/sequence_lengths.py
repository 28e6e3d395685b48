"""The lengths that attention ops take as host lists, made once per batch and not per layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from mooncake_hal.backend import AttentionBatch

_MASK = 2048
"""Side of the causal mask that the ops stretch over any length (sparse_mode 3)."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLengths:
    """Some sequences of a batch, in the form of the layout TND.

    Args:
        query_ends: running sum of their query lengths.
        context_lens: KV tokens of each.
        block_table: [sequences, blocks] int32.
    """

    query_ends: list[int]
    context_lens: list[int]
    block_table: Tensor


@lru_cache(maxsize=2)
def decodes_of(batch: AttentionBatch) -> SequenceLengths:
    """The batch's leading sequences of one query token."""
    count = batch.num_decodes
    lengths = list(batch.host_context_lens[:count])
    return SequenceLengths(list(range(1, count + 1)), lengths, batch.block_tables[:count])


@lru_cache(maxsize=2)
def prompts_of(batch: AttentionBatch) -> SequenceLengths:
    """The sequences after the decodes."""
    count = batch.num_decodes
    ends = list(accumulate(batch.host_query_lens[count:]))
    return SequenceLengths(ends, list(batch.host_context_lens[count:]), batch.block_tables[count:])


@lru_cache(maxsize=2)
def chunks_of(batch: AttentionBatch, most_tokens: int) -> SequenceLengths:
    """The prompts, cut into sequences of at most ``most_tokens`` query tokens.

    A piece sees what its last token sees, so its context ends there.
    """
    rows, lengths, contexts = [], [], []
    for row in range(batch.num_decodes, len(batch.host_query_lens)):
        query, context = batch.host_query_lens[row], batch.host_context_lens[row]
        for start in range(0, query, most_tokens):
            stop = min(start + most_tokens, query)
            rows.append(row)
            lengths.append(stop - start)
            contexts.append(context - query + stop)
    table = batch.block_tables[torch.tensor(rows, device=batch.block_tables.device)]
    return SequenceLengths(list(accumulate(lengths)), contexts, table)


@lru_cache
def causal_mask(device: torch.device) -> Tensor:
    """[2048, 2048] int8: 1 where a token would see what comes after it."""
    return torch.ones(_MASK, _MASK, dtype=torch.int8, device=device).triu_(1)
