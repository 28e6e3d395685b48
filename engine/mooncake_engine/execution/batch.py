"""Turns a step plan into the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.execution.request_state import RequestState, RequestTable
from mooncake_engine.scheduling.plan import ScheduledSequence
from mooncake_hal.backend import AttentionBatch


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One forward pass.

    Args:
        token_ids, positions: [tokens] int64.
        attention: which of them attend to what.
        sampled_rows: [n] int64, last token of each sequence that samples, once more for each
            sibling; None if that is every token, in order.
        sampling: the requests of these rows.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    sampled_rows: Tensor | None
    sampling: list[RequestState]


def make_inputs(
    sequences: Sequence[ScheduledSequence],
    states: Sequence[RequestState],
    requests: RequestTable,
    block_size: int,
    device: torch.device,
) -> StepInputs:
    """Lay out the sequences of a plan; their tables already hold the step's new blocks."""
    counts = [sequence.count for sequence in sequences]
    starts = [sequence.start for sequence in sequences]
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    block_tables = requests.tables.gather(
        np.fromiter((state.row for state in states), np.int64, len(states)),
        -(-max(contexts) // block_size),
    )
    owners, positions = _positions(np.array(counts), np.array(starts), query_start)
    attention = AttentionBatch(
        num_decodes=_leading_ones(counts),
        query_start=_on(device, query_start),
        context_lens=_on(device, np.array(contexts, dtype=np.int32)),
        block_tables=_on(device, block_tables),
        slot_mapping=_on(device, _slots(block_tables, owners, positions, block_size)),
        block_size=block_size,
        host_query_lens=tuple(counts),
        host_context_lens=tuple(contexts),
    )
    num_sampled = [sequence.is_sampling + len(sequence.siblings) for sequence in sequences]
    return StepInputs(
        token_ids=_on(device, _token_ids(states, starts, contexts)),
        positions=_on(device, positions),
        attention=attention,
        sampled_rows=_sampled_rows(query_start, num_sampled, device),
        sampling=_samplers(sequences, states, requests),
    )


def _on(device: torch.device, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _leading_ones(counts: list[int]) -> int:
    """How many sequences, from the first on, have one token."""
    return next((index for index, count in enumerate(counts) if count != 1), len(counts))


def _positions(
    counts: NDArray[np.int64], starts: NDArray[np.int64], query_start: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which sequence each token belongs to, and its position in it."""
    owners = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[owners]
    return owners, positions


def _slots(
    block_tables: NDArray[np.int32],
    owners: NDArray[np.int64],
    positions: NDArray[np.int64],
    block_size: int,
) -> NDArray[np.int64]:
    """Where each token's KV goes: ``block_id * block_size + offset``."""
    slots = block_tables[owners, positions // block_size].astype(np.int64)
    slots *= block_size
    slots += positions % block_size
    return slots


def _token_ids(
    states: Sequence[RequestState], starts: list[int], stops: list[int]
) -> NDArray[np.int64]:
    tokens: list[int] = []
    for state, start, stop in zip(states, starts, stops, strict=True):
        if stop - start == 1:
            tokens.append(state.token_ids[start])
        else:
            tokens += state.token_ids[start:stop]
    return np.array(tokens, dtype=np.int64)


def _sampled_rows(
    query_start: NDArray[np.int32], num_sampled: list[int], device: torch.device
) -> Tensor | None:
    is_every_token = query_start[-1] == len(num_sampled)
    if is_every_token and all(count == 1 for count in num_sampled):
        return None
    rows = np.repeat(query_start[1:].astype(np.int64) - 1, num_sampled)
    return _on(device, rows)


def _samplers(
    sequences: Sequence[ScheduledSequence], states: Sequence[RequestState], requests: RequestTable
) -> list[RequestState]:
    """The requests that sample, siblings behind the one whose logits they share."""
    samplers = []
    for sequence, state in zip(sequences, states, strict=True):
        if sequence.is_sampling:
            samplers.append(state)
            samplers += [requests[name] for name in sequence.siblings]
    return samplers
