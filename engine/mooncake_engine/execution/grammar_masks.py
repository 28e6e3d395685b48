"""Answers that follow a grammar: which tokens may come next, as a mask over logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.execution.request_state import RequestState, SamplingState


def mask_logits(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Rule out, in place, what the rows' grammars do not allow.

    Args:
        logits: [rows, vocab] float32.
        states: the request of each row.
    """
    rows, masks = [], []
    for row, state in enumerate(states):
        allowed = None if state.grammar is None else state.grammar.allowed()
        if allowed is not None:
            rows.append(row)
            masks.append(np.frombuffer(allowed, np.uint8))
    if not rows:
        return
    bits = np.unpackbits(np.stack(masks), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, -math.inf)


def failures(states: Sequence[RequestState]) -> dict[str, str]:
    """Why requests can't follow their grammars any more, by id."""
    return {
        state.request_id: state.grammar.failure
        for state in states
        if state.grammar is not None and state.grammar.failure is not None
    }
