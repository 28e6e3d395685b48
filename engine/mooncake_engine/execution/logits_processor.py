"""Changes logits as the requests of a batch ask, before tokens are chosen.

The order is: logit bias, penalties, masking of end tokens, bad words, allowed tokens, grammars. The
host copies small tables to the device, which applies them to the whole batch at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.execution.penalties import PenalisedRow, Penalties
from mooncake_engine.execution.request_table import SamplingState
from mooncake_hal.backend_parts import to_device

_FORBIDDEN_OF_BYTE = (
    (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0)
    .view(np.int64)
    .reshape(-1)
)
"""[256] int64, each eight packed bools: for each byte of a bitmask of allowed tokens, which of its
eight tokens are forbidden."""


_RowCells = tuple[int, NDArray[np.int64], NDArray[np.float32]]
"""A row, some of its token ids, and a value for each of them. Both are arrays, as a row may have
a thousand tokens."""


class LogitsProcessor:
    """Changes the logits of a batch as its requests ask.

    It copies biases, penalties and ``allowed_token_ids`` to the device once, the masks of end
    tokens and of bad words when they change, and the tokens that grammars allow in each step. It
    never waits for the device.

    Args:
        states: the request of each row.
        eos_token_ids: masked, with a request's stop ids, until it has ``min_tokens``.
        device: device of the logits.
    """

    def __init__(
        self, states: Sequence[SamplingState], eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self._states = states
        self._eos_token_ids = eos_token_ids
        self._device = device
        rows = list(enumerate(states))
        self._bias = self._cells(
            [(row, *state.bias) for row, state in rows if state.bias is not None]
        )
        penalised = [
            PenalisedRow(row, state.counts, state.sampling)
            for row, state in rows
            if state.counts is not None
        ]
        self._penalties = Penalties(penalised, device) if penalised else None
        self._growing = [row for row, state in rows if state.sampling.min_tokens > 0]
        self._ends: tuple[Tensor, ...] = ()
        self._ends_of: list[int] = []
        self._worded = [row for row, state in rows if state.bad_words is not None]
        self._bad_words: tuple[Tensor, ...] = ()
        self._bad_words_of: list[tuple[int, ...]] = []
        self._allowed = {row: state.allowed for row, state in rows if state.allowed is not None}
        self._allowed_masks: tuple[Tensor, ...] = ()
        self._grammars = [(row, s.grammar) for row, s in rows if s.grammar is not None]

    def has_effect(self) -> bool:
        """Whether ``apply`` would change any logits in this step."""
        masks = (self._worded, self._allowed, self._grammars)
        is_lasting = self._bias or self._penalties is not None or any(masks)
        return bool(is_lasting or self._end_masked())

    def apply(self, logits: Tensor) -> None:
        """Change the logits in place.

        Args:
            logits: [rows, vocab] float32.
        """
        if self._bias:
            rows, token_ids, values = self._bias
            logits.index_put_((rows, token_ids), values, accumulate=True)
        if self._penalties is not None:
            self._penalties.apply(logits)
        self._mask_ends(logits)
        if self._worded:
            self._mask_bad_words(logits)
        if self._allowed:
            if not self._allowed_masks:
                self._allowed_masks = self._masks(self._allowed, logits.shape[1])
            _forbid_others(logits, *self._allowed_masks)
        self._follow_grammars(logits)

    def _end_masked(self) -> list[int]:
        """Rows whose requests have fewer than ``min_tokens`` output tokens."""
        states = self._states
        return [
            row
            for row in self._growing
            if states[row].num_output_tokens < states[row].sampling.min_tokens
        ]

    def _mask_ends(self, logits: Tensor) -> None:
        masked = self._end_masked()
        if masked != self._ends_of:  # a request has reached its min_tokens
            self._ends_of = masked
            ends = [(row, np.array(self._ends_for(row), dtype=np.int64)) for row in masked]
            self._ends = self._masked_cells(ends)
        if self._ends:
            rows, token_ids, values = self._ends
            logits.index_put_((rows, token_ids), values)

    def _mask_bad_words(self, logits: Tensor) -> None:
        positions = [self._states[row].bad_words for row in self._worded]
        found = [() if each is None else each.forbidden() for each in positions]
        if found != self._bad_words_of:
            self._bad_words_of = found
            words = [np.array(token_ids, dtype=np.int64) for token_ids in found]
            self._bad_words = self._masked_cells(list(zip(self._worded, words, strict=True)))
        if self._bad_words:
            rows, token_ids, values = self._bad_words
            logits.index_put_((rows, token_ids), values)

    def _ends_for(self, row: int) -> tuple[int, ...]:
        sampling = self._states[row].sampling
        eos_token_ids = () if sampling.ignore_eos else self._eos_token_ids
        return (*eos_token_ids, *sampling.stop_token_ids)

    def _follow_grammars(self, logits: Tensor) -> None:
        """Mask the tokens that grammars forbid."""
        found = ((row, grammar.allowed()) for row, grammar in self._grammars)
        allowed = {row: tokens for row, tokens in found if tokens is not None}
        if allowed:
            _forbid_others(logits, *self._masks(allowed, logits.shape[1]))

    def _masks(self, allowed: Mapping[int, bytes], vocab_size: int) -> tuple[Tensor, ...]:
        """Copy masks of allowed tokens by row to the device, one bit per token; returns the
        arguments of ``_forbid_others``."""
        packed = np.zeros((len(allowed), -(-vocab_size // 8)), dtype=np.uint8)
        for bits, tokens in zip(packed, allowed.values(), strict=True):
            known = np.frombuffer(tokens, dtype=np.uint8)[: len(bits)]
            bits[: len(known)] = known
        arrays = (np.array(list(allowed), dtype=np.int64), packed, _FORBIDDEN_OF_BYTE)
        return tuple(to_device(self._device, arrays))

    def _masked_cells(self, given: Sequence[tuple[int, NDArray[np.int64]]]) -> tuple[Tensor, ...]:
        """As ``_cells``, to mask the tokens."""
        return self._cells(
            [(row, ids, np.full(len(ids), -math.inf, dtype=np.float32)) for row, ids in given]
        )

    def _cells(self, given: Sequence[_RowCells]) -> tuple[Tensor, ...]:
        """Copy cells to the device: rows and token ids, [n] int64, and values, [n] float32. Empty
        if there are no cells."""
        if not any(len(token_ids) for _, token_ids, _ in given):
            return ()
        rows, token_ids, values = zip(*given, strict=True)
        lengths = [len(ids) for ids in token_ids]
        arrays = (
            np.repeat(np.array(rows, dtype=np.int64), lengths),
            np.concatenate(token_ids),
            np.concatenate(values),
        )
        return tuple(to_device(self._device, arrays))


def _forbid_others(logits: Tensor, rows: Tensor, packed: Tensor, forbidden_of_byte: Tensor) -> None:
    """Mask the tokens that some rows don't allow, in place.

    Args:
        logits: [batch, vocab] float32.
        rows: [n] int64, the rows with a mask.
        packed: [n, bytes] uint8, a bit per token: whether it is allowed.
        forbidden_of_byte: ``_FORBIDDEN_OF_BYTE``.
    """
    eights = forbidden_of_byte.index_select(0, packed.view(-1).int())
    forbidden = eights.view(len(packed), -1).view(torch.bool)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)
