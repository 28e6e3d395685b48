"""Log probabilities of sampled tokens, and of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mooncake_engine.execution.request_table import CachedRequest
from mooncake_engine.execution.speculation.drafts import StepDrafts
from mooncake_engine.messages import TokenLogprobs
from mooncake_engine.scheduling.step_plan import ScheduledSequence

_ROWS_PER_BATCH = 128
"""Prompt tokens whose logits are computed at once: 78 MB for a vocabulary of 152,000 tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """Log probabilities of one chosen token per row, and of the row's most probable tokens.

    Args:
        num_top: how many of the most probable tokens each row reports.
        chosen: [rows] float32, log probabilities of the chosen tokens.
        ranks: [rows] int64, ranks of the chosen tokens, from 1.
        top_ids: [rows, largest num_top] int64, the most probable first.
        top_values: [rows, largest num_top] float32, log probabilities of ``top_ids``.
    """

    num_top: Sequence[int]
    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor

    @classmethod
    def of(cls, logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LogprobTensors:
        """Compute log probabilities on the device of the logits, without waiting for it.

        Args:
            logits: [rows, vocab], as the model returned them.
            token_ids: [rows] int64, the chosen tokens.
            num_top: see the class.
        """
        logprobs = logits.float().log_softmax(dim=-1)
        chosen = logprobs.gather(1, token_ids.unsqueeze(1))
        ranks = (logprobs > chosen).sum(dim=-1).add_(1)
        best = logprobs.topk(min(max(num_top), logits.shape[1]), dim=-1)
        return cls(num_top, chosen.squeeze(1), ranks, best.indices, best.values)

    def moved(self, move: Callable[[Tensor], Tensor]) -> LogprobTensors:
        """A copy on another device: ``move`` copies each tensor."""
        tensors = (self.chosen, self.ranks, self.top_ids, self.top_values)
        return LogprobTensors(self.num_top, *map(move, tensors))

    def describe(self, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """The log probabilities as messages. ``token_ids`` are the chosen tokens of the rows."""
        chosen, ranks = self.chosen.tolist(), self.ranks.tolist()
        rows = zip(token_ids, chosen, ranks, self.num_top, strict=True)
        tops = zip(self.top_ids.tolist(), self.top_values.tolist(), strict=True)
        described = []
        for (token_id, logprob, rank, count), (top_ids, values) in zip(rows, tops, strict=True):
            top = tuple(zip(top_ids[:count], values[:count], strict=True))
            described.append(TokenLogprobs(token_id, logprob, top, rank))
        return described


def score_prompts(
    hidden: Tensor,
    sequences: Sequence[ScheduledSequence],
    states: Sequence[CachedRequest],
    drafts: StepDrafts,
    to_logits: Callable[[Tensor], Tensor],
) -> dict[str, tuple[TokenLogprobs, ...]]:
    """Log probabilities of the prompt tokens that this step's tokens predict, by request id, for
    the requests that ask for ``prompt_logprobs``.

    Args:
        hidden: [tokens, hidden] of the whole step, sequence after sequence.
        sequences: the sequences of the step.
        states: the request of each sequence.
        drafts: the draft tokens that ran after the sequences' own tokens.
        to_logits: maps [rows, hidden] to [rows, vocab]; a collective, which every rank calls
            equally often.
    """
    scores: dict[str, tuple[TokenLogprobs, ...]] = {}
    if all(state.sampling.prompt_logprobs is None for state in states):
        return scores
    row = 0
    for sequence, state in zip(sequences, states, strict=True):
        count = _num_scored(sequence, state)
        if count:
            rows = hidden[row : row + count]
            targets = state.token_ids[sequence.start + 1 : sequence.start + 1 + count]
            num_top = state.sampling.prompt_logprobs or 0
            scores[state.request_id] = _score(rows, targets, num_top, to_logits)
        draft = drafts.by_request.get(sequence.request_id)
        row += sequence.count + (0 if draft is None else len(draft.token_ids))
    return scores


def _num_scored(sequence: ScheduledSequence, state: CachedRequest) -> int:
    """How many of the sequence's tokens precede a prompt token whose log probability is wanted."""
    if state.sampling.prompt_logprobs is None:
        return 0
    last = min(sequence.start + sequence.count, state.num_prompt_tokens - 1)
    return max(last - sequence.start, 0)


def _score(
    hidden: Tensor, targets: Sequence[int], num_top: int, to_logits: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprobs, ...]:
    scores: list[TokenLogprobs] = []
    for start in range(0, len(targets), _ROWS_PER_BATCH):
        part = targets[start : start + _ROWS_PER_BATCH]
        logits = to_logits(hidden[start : start + _ROWS_PER_BATCH])
        ids = torch.tensor(part).to(logits.device)
        scores += LogprobTensors.of(logits, ids, [num_top] * len(part)).describe(part)
    return tuple(scores)
