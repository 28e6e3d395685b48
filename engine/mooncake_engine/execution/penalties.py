"""Repetition, frequency and presence penalties, from token counts that are kept on the device.

As the counts are on the device, a step does not have to wait until the host knows the tokens that
the step before it sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.sampling_params import SamplingParams
from mooncake_hal.backend_parts import to_device

_INITIAL_ROWS = 8
"""Rows that a table allocates for its first request; it doubles when they are used up."""


class TokenCountTable:
    """Token counts of all requests of a worker that have penalties. It allocates no memory before
    the first of them.

    Args:
        vocab_size: length of a row, in tokens.
        device: device that holds the counts.

    Attributes:
        output: [rows, vocab] float32, how often each token occurs in the output.
        is_seen: [rows, vocab] bool, whether each token occurs in the prompt or the output.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros(0, vocab_size, device=device)
        self.is_seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    def add_request(self, prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
        """Assign a row to a request and count the tokens that it has so far."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        tokens = [np.array(each, dtype=np.int64) for each in (prompt, output)]
        in_prompt, in_output = to_device(self.output.device, tokens)
        occurrences = torch.ones_like(in_output, dtype=self.output.dtype)
        self.output[row].zero_().index_add_(0, in_output, occurrences)
        is_seen = self.is_seen[row].zero_()
        is_seen.index_fill_(0, in_prompt, True).index_fill_(0, in_output, True)
        return TokenCounts(self, row)

    def free(self, counts: TokenCounts) -> None:
        """Release the row of a request that has ended."""
        self._free.append(counts.row)

    def add_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count one more output token for each of several rows.

        Args:
            rows: [n] int64, all different.
            token_ids: [n] int64, the token of each row.
        """
        self.output[rows, token_ids] += 1
        self.is_seen[rows, token_ids] = True

    def copy_row(self, row: int) -> TokenCounts:
        """Copy the row's counts to a table of their own."""
        alone = TokenCountTable(self.output.shape[1], self.output.device)
        alone.output = self.output[row : row + 1].clone()
        alone.is_seen = self.is_seen[row : row + 1].clone()
        return TokenCounts(alone, 0)

    def _grow(self) -> None:
        first = len(self.output)
        self.output = torch.cat((self.output, self._more(self.output, first)))
        self.is_seen = torch.cat((self.is_seen, self._more(self.is_seen, first)))
        self._free = list(range(len(self.output) - 1, first - 1, -1))

    @staticmethod
    def _more(rows: Tensor, num_rows: int) -> Tensor:
        return rows.new_zeros(max(num_rows, _INITIAL_ROWS), rows.shape[1])


class TokenCounts:
    """The token counts of one request: a row of a table.

    Args:
        table: the table that has the row.
        row: index of the row.
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
        """A copy of the counts with one more output token."""
        later = self.table.copy_row(self.row)
        later.add(token_id)
        return later


class PenalisedRow(NamedTuple):
    """A row of a batch whose request has penalties.

    Args:
        row: index of the row in the batch.
        counts: the request's token counts.
        params: the request's sampling parameters.
    """

    row: int
    counts: TokenCounts
    params: SamplingParams


class Penalties:
    """The penalties of a batch. The factors are copied to the device once, and applied in every
    step.

    The repetition penalty comes first (Keskar et al. 2019: divide positive, multiply negative
    logits), then OpenAI's frequency and presence penalties.

    Args:
        rows: the rows with penalties, at least one.
        device: device of the logits.
    """

    def __init__(self, rows: Sequence[PenalisedRow], device: torch.device) -> None:
        self._counts = [each.counts for each in rows]
        params = [each.params for each in rows]
        self._rows, self._count_rows, *factors = to_device(
            device,
            [
                np.array([each.row for each in rows], dtype=np.int64),
                np.array([each.row for each in self._counts], dtype=np.int64),
                np.array([[each.repetition_penalty] for each in params], dtype=np.float32),
                np.array([[each.frequency_penalty] for each in params], dtype=np.float32),
                np.array([[each.presence_penalty] for each in params], dtype=np.float32),
            ],
        )
        self._repetition, self._frequency, self._presence = factors  # [rows, 1] each

    def apply(self, logits: Tensor) -> None:
        """Apply the penalties in place.

        Args:
            logits: [batch, vocab] float32.
        """
        output, is_seen = self._gather()
        rows = logits[self._rows]
        scaled = torch.where(rows > 0, rows / self._repetition, rows * self._repetition)
        penalised = torch.where(is_seen, scaled, rows)
        penalised -= self._frequency * output
        penalised -= self._presence * (output > 0)
        logits[self._rows] = penalised

    def _gather(self) -> tuple[Tensor, Tensor]:
        """``output`` and ``is_seen`` of the rows: [rows, vocab] each."""
        counts, table = self._counts, self._counts[0].table
        if all(each.table is table for each in counts):  # true unless some are for draft tokens
            return table.output[self._count_rows], table.is_seen[self._count_rows]
        output = torch.stack([each.table.output[each.row] for each in counts])
        return output, torch.stack([each.table.is_seen[each.row] for each in counts])
