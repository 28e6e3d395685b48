"""Turns a step plan into the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.execution.request_table import BlockTables, CachedRequest, RequestTable
from mooncake_engine.execution.speculation.drafts import NO_DRAFTS, StepDrafts
from mooncake_engine.scheduling.step_plan import ScheduledSequence
from mooncake_hal.backend import AttentionBatch
from mooncake_hal.backend_parts import index_tensor, to_device


class ScheduledTokens(NamedTuple):
    """The tokens that run, as a range per sequence: lists of equal length, sequences of one token
    first.

    Args:
        rows: the row of each sequence in the block tables.
        starts: the position of its first token; all tokens before it have their KV.
        counts: the number of its tokens.
    """

    rows: list[int]
    starts: list[int]
    counts: list[int]

    def add(self, row: int, start: int, count: int) -> None:
        """Add tokens of one sequence."""
        self.rows.append(row)
        self.starts.append(start)
        self.counts.append(count)

    def add_single_tokens(self, row: int, start: int, count: int) -> None:
        """Add tokens of one sequence, each as a sequence of its own."""
        self.rows.extend([row] * count)
        self.starts.extend(range(start, start + count))
        self.counts.extend([1] * count)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInputs:
    """The inputs of one forward pass.

    Args:
        token_ids, positions: [tokens] int64.
        attention: the attention batch: context lengths, block tables and slots.
        last_rows: [sequences] int64 on the host, the row of each sequence's last token.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    last_rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The inputs of a step: its forward pass, and the rows to sample from.

    Args:
        token_ids, positions, attention: see ``ForwardInputs``.
        sampled_rows: [n] int64, the row of the last token of each sequence that samples, repeated
            for each sibling, and followed by the rows of its draft tokens; None if that is every
            row, in order.
        sampling: the requests that sample; siblings follow the request whose logits they share.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    sampled_rows: Tensor | None
    sampling: list[CachedRequest]


class InputBuilder:
    """Builds the inputs of steps. What depends only on which requests decode is kept from step to
    step, since most steps have the decodes of the step before and nothing else.

    Args:
        requests: all running requests.
        block_size: tokens per block.
        device: device of the tensors.
    """

    def __init__(self, requests: RequestTable, block_size: int, device: torch.device) -> None:
        self._requests = requests
        self._block_size = block_size
        self._device = device
        self._decodes = _DecodeRows.of((), device)

    def build(
        self,
        sequences: Sequence[ScheduledSequence],
        states: Sequence[CachedRequest],
        drafts: StepDrafts = NO_DRAFTS,
        newest: Tensor | None = None,
    ) -> StepInputs:
        """Build the inputs of a step. The block tables must already have the step's new blocks.

        Args:
            sequences: the sequences of the step plan.
            states: the request of each sequence.
            drafts: draft tokens to run after the last tokens of their requests.
            newest: [sequences] int64, the tokens of the sequences if each runs one that only the
                device knows; None takes those of the states. Becomes part of the inputs.
        """
        starts = [sequence.start for sequence in sequences]
        counts = [sequence.count for sequence in sequences]
        num_sampled = [sequence.is_sampling + len(sequence.siblings) for sequence in sequences]
        is_each = num_sampled.count(1) == len(num_sampled)
        if is_each and counts.count(1) == len(counts) and not drafts.by_request:
            return self._decode_inputs(states, starts, newest)
        token_ids = _token_ids(states, starts, counts)
        scheduled = ScheduledTokens([state.row for state in states], starts, counts)
        drafts_at: list[int] = []
        if drafts.by_request:
            found = [drafts.by_request.get(sequence.request_id) for sequence in sequences]
            drafted = [[] if draft is None else draft.token_ids for draft in found]
            scheduled, token_ids, num_sampled, drafts_at = _insert_drafts(
                scheduled, token_ids, num_sampled, drafted
            )
        tables, device = self._requests.tables, self._device
        forward = lay_out(scheduled, token_ids, tables, self._block_size, device)
        if drafts.on_device is not None:
            at = index_tensor(device, drafts_at)
            forward.token_ids.index_copy_(0, at, drafts.on_device.clamp(min=0))
        rows = _sampled_rows(forward.last_rows, num_sampled)
        return StepInputs(
            token_ids=forward.token_ids if newest is None else newest,
            positions=forward.positions,
            attention=forward.attention,
            sampled_rows=None if rows is None else to_device(device, [rows])[0],
            sampling=list(states) if is_each else _samplers(sequences, states, self._requests),
        )

    def _decode_inputs(
        self, states: Sequence[CachedRequest], starts: list[int], newest: Tensor | None
    ) -> StepInputs:
        """The inputs of a step in which every sequence runs one token and samples after it."""
        if self._decodes.states != states:
            self._decodes = _DecodeRows.of(states, self._device)
        decodes, tables = self._decodes, self._requests.tables
        positions = np.array(starts, dtype=np.int64)
        ends = positions + 1
        contexts: list[int] = ends.tolist()
        slots = _slots(tables, decodes.rows, positions, self._block_size)
        tokens = [] if newest is not None else [np.array(_token_ids(states, starts, decodes.ones))]
        arrays = (positions, slots, ends.astype(np.int32), *tables.take_changes(), *tokens)
        on_device = to_device(self._device, arrays)
        token_ids = on_device.pop() if newest is None else newest
        num_blocks = -(-max(contexts) // self._block_size)
        attention = AttentionBatch(
            num_decodes=len(states),
            query_start=decodes.query_start,
            context_lens=on_device[2],
            block_tables=tables.gather(decodes.rows_on_device, num_blocks, on_device[3:]),
            slot_mapping=on_device[1],
            block_size=self._block_size,
            host_query_lens=decodes.ones,
            host_context_lens=tuple(contexts),
        )
        return StepInputs(token_ids, on_device[0], attention, None, decodes.states)


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeRows:
    """The parts of a decode step's inputs that depend only on which requests decode.

    Args:
        states: the requests.
        rows, rows_on_device: [states] int64, their rows in the block tables.
        query_start: see ``AttentionBatch``.
        ones: the number of tokens of each, on the host.
    """

    states: list[CachedRequest]
    rows: NDArray[np.int64]
    rows_on_device: Tensor
    query_start: Tensor
    ones: tuple[int, ...]

    @classmethod
    def of(cls, states: Sequence[CachedRequest], device: torch.device) -> _DecodeRows:
        rows = np.array([state.row for state in states], dtype=np.int64)
        query_start = np.arange(len(states) + 1, dtype=np.int32)
        on_device = to_device(device, (rows, query_start))
        return cls(list(states), rows, on_device[0], on_device[1], (1,) * len(states))


def lay_out(
    scheduled: ScheduledTokens,
    token_ids: Sequence[int],
    tables: BlockTables,
    block_size: int,
    device: torch.device,
) -> ForwardInputs:
    """Build the tensors of a forward pass.

    Args:
        scheduled: the tokens that run.
        token_ids: their ids, sequence after sequence.
        tables: block tables of the sequences.
        block_size: tokens per block.
        device: device of the tensors.
    """
    counts = scheduled.counts
    rows, firsts = (np.array(each, dtype=np.int64) for each in (scheduled.rows, scheduled.starts))
    ends = firsts + counts
    contexts: list[int] = ends.tolist()
    query_start, owners, positions = _positions(counts, firsts)
    slots = _slots(tables, rows[owners], positions, block_size)
    on_device = to_device(
        device,
        (
            query_start,
            ends.astype(np.int32),
            rows,
            slots,
            np.array(token_ids, dtype=np.int64),
            positions,
            *tables.take_changes(),
        ),
    )
    attention = AttentionBatch(
        num_decodes=_leading_ones(counts),
        query_start=on_device[0],
        context_lens=on_device[1],
        block_tables=tables.gather(on_device[2], -(-max(contexts) // block_size), on_device[6:]),
        slot_mapping=on_device[3],
        block_size=block_size,
        host_query_lens=tuple(counts),
        host_context_lens=tuple(contexts),
    )
    return ForwardInputs(
        token_ids=on_device[4],
        positions=on_device[5],
        attention=attention,
        last_rows=query_start[1:].astype(np.int64) - 1,
    )


def _slots(
    tables: BlockTables, rows: NDArray[np.int64], positions: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """The slot of each token, of which the row and the position in the row are given."""
    slots = tables.find(rows, positions // block_size).astype(np.int64)
    slots *= block_size
    slots += positions % block_size
    return slots


def _insert_drafts(
    scheduled: ScheduledTokens,
    token_ids: list[int],
    num_sampled: list[int],
    drafted: list[list[int]],
) -> tuple[ScheduledTokens, list[int], list[int], list[int]]:
    """Insert each draft token as a sequence of its own after the sequence that it continues, so
    that attention uses the kernels for single tokens. All draft tokens sample.

    Returns:
        The scheduled tokens, the token ids and the samples per sequence, with draft tokens; and the
        indexes of the draft tokens among the token ids.
    """
    more = ScheduledTokens([], [], [])
    tokens: list[int] = []
    sampled: list[int] = []
    drafts_at: list[int] = []
    first = 0
    for row, start, count, num, draft_tokens in zip(*scheduled, num_sampled, drafted, strict=True):
        more.add(row, start, count)
        tokens += token_ids[first : first + count]
        first += count
        sampled.append(num)
        more.add_single_tokens(row, start + count, len(draft_tokens))
        drafts_at += range(len(tokens), len(tokens) + len(draft_tokens))
        tokens += draft_tokens
        sampled += [1] * len(draft_tokens)
    return more, tokens, sampled, drafts_at


def _leading_ones(counts: list[int]) -> int:
    """The number of leading sequences that have one token."""
    if counts.count(1) == len(counts):
        return len(counts)
    return next(index for index, count in enumerate(counts) if count != 1)


def _positions(
    counts: list[int], starts: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """The bounds of each sequence's tokens, the sequence of each token, and its position there."""
    every = np.arange(len(counts))
    if counts.count(1) == len(counts):  # a step of decodes
        return np.arange(len(counts) + 1, dtype=np.int32), every, starts
    query_start = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    owners = np.repeat(every, counts)
    return query_start, owners, np.arange(query_start[-1]) + (starts - query_start[:-1])[owners]


def _token_ids(
    states: Sequence[CachedRequest], starts: Sequence[int], counts: Sequence[int]
) -> list[int]:
    if counts.count(1) == len(counts):
        return [state.token_ids[start] for state, start in zip(states, starts, strict=True)]
    tokens: list[int] = []
    for state, start, count in zip(states, starts, counts, strict=True):
        tokens += state.token_ids[start : start + count]
    return tokens


def _sampled_rows(last_rows: NDArray[np.int64], num_sampled: list[int]) -> NDArray[np.int64] | None:
    is_every_token = last_rows[-1] == len(num_sampled) - 1
    if is_every_token and num_sampled.count(1) == len(num_sampled):
        return None
    return np.repeat(last_rows, num_sampled)


def _samplers(
    sequences: Sequence[ScheduledSequence], states: Sequence[CachedRequest], requests: RequestTable
) -> list[CachedRequest]:
    """The requests that sample; siblings follow the request whose logits they share."""
    samplers = []
    for sequence, state in zip(sequences, states, strict=True):
        if sequence.is_sampling:
            samplers.append(state)
            samplers += [requests[name] for name in sequence.siblings]
    return samplers
