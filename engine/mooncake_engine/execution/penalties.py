"""Penalties for tokens that a request has already: what occurs how often is kept on the device.

So a step need not wait for the host to learn which tokens the one before it has sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend_parts import index_tensor

_FIRST_ROWS = 8


class TokenCountTable:
    """How often each token occurs, for all requests of a worker that have penalties. It takes no
    memory before the first of them.

    Args:
        vocab_size: length of a row.
        device: where the counts live.

    Attributes:
        output: [rows, vocab] float32, occurrences in the output.
        is_seen: [rows, vocab] bool, whether a token occurs in prompt or output.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros(0, vocab_size, device=device)
        self.is_seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    def add_request(self, prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
        """A row for a request with these tokens so far."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        in_output = self._histogram(output)
        self.output[row] = in_output
        self.is_seen[row] = (self._histogram(prompt) + in_output) > 0
        return TokenCounts(self, row)

    def free(self, counts: TokenCounts) -> None:
        """The request is gone."""
        self._free.append(counts.row)

    def add_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count one more output token of each of some rows.

        Args:
            rows: [n] int64, different ones.
            token_ids: [n] int64.
        """
        self.output[rows, token_ids] += 1
        self.is_seen[rows, token_ids] = True

    def copy_row(self, row: int) -> TokenCounts:
        """The row's counts in a table of their own."""
        alone = TokenCountTable(self.output.shape[1], self.output.device)
        alone.output = self.output[row : row + 1].clone()
        alone.is_seen = self.is_seen[row : row + 1].clone()
        return TokenCounts(alone, 0)

    def _histogram(self, tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor(tokens, dtype=torch.int64)
        counts = torch.bincount(ids, minlength=self.output.shape[1]).float()
        return counts.to(self.output.device)

    def _grow(self) -> None:
        first = len(self.output)
        self.output = torch.cat((self.output, self._more(self.output, first)))
        self.is_seen = torch.cat((self.is_seen, self._more(self.is_seen, first)))
        self._free = list(range(len(self.output) - 1, first - 1, -1))

    @staticmethod
    def _more(rows: Tensor, num_rows: int) -> Tensor:
        return rows.new_zeros(max(num_rows, _FIRST_ROWS), rows.shape[1])


class TokenCounts:
    """How often each token occurs in one request: a row of a table.

    Args:
        table: whose row it is.
        row: which.
    """

    __slots__ = ("row", "table")

    def __init__(self, table: TokenCountTable, row: int) -> None:
        self.table = table
        self.row = row

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        self.table.output[self.row, token_id] += 1
        self.table.is_seen[self.row, token_id] = True

    def after(self, token_id: int) -> TokenCounts:
        """Counts of their own, one token later."""
        later = self.table.copy_row(self.row)
        later.add(token_id)
        return later


def penalise(
    logits: Tensor, counts: Sequence[TokenCounts], params: Sequence[SamplingParams]
) -> Tensor:
    """Repetition (Keskar et al. 2019: divide positive, multiply negative logits), then OpenAI's.

    Args:
        logits: [n, vocab] float32, n > 0.
        counts, params: of each row.

    Returns:
        [n, vocab] float32.
    """
    output, is_seen = _gather(counts, logits.device)
    repetition = column(logits, [each.repetition_penalty for each in params])
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(is_seen, scaled, logits)
    penalised -= column(logits, [each.frequency_penalty for each in params]) * output
    penalised -= column(logits, [each.presence_penalty for each in params]) * (output > 0)
    return penalised


def column(like: Tensor, values: Sequence[float]) -> Tensor:
    """[values, 1], of the type and on the device of a tensor; the device is not waited for."""
    made = torch.tensor(values, dtype=like.dtype).unsqueeze(1)
    return made.to(like.device, non_blocking=True)  # what new_tensor does waits for the device


def _gather(counts: Sequence[TokenCounts], device: torch.device) -> tuple[Tensor, Tensor]:
    """Output counts and whether tokens are seen: [counts, vocab] each."""
    table = counts[0].table
    if all(each.table is table for each in counts):  # as all are but those behind draft tokens
        rows = index_tensor(device, [each.row for each in counts])
        return table.output[rows], table.is_seen[rows]
    output = torch.stack([each.table.output[each.row] for each in counts])
    return output, torch.stack([each.table.is_seen[each.row] for each in counts])
