"""Rejection sampling: decides which draft tokens are accepted. Pure functions of tensors and ints.

The model chooses a token at the position of every draft token, and draft tokens are accepted up to
the first that differs from the choice. As the output consists of choices, its distribution does not
depend on the draft. If a draft token was itself sampled from a known distribution, the choice
depends on it as in Leviathan et al. 2023, which maximises the probability of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.execution.sampling_metadata import column


@dataclass(frozen=True, slots=True, eq=False)
class SampledDrafts:
    """Draft tokens that were sampled from known distributions, on the device.

    Args:
        rows: the row of the batch that verifies each token, ascending.
        token_ids: [rows] int64; negative if there was no finite logit to sample from.
        distributions: [rows, vocab] float32, the probabilities that each was sampled from.
    """

    rows: Sequence[int]
    token_ids: Tensor
    distributions: Tensor


def rejection_weights(weights: Tensor, drawn: SampledDrafts, numbers: Sequence[float]) -> Tensor:
    """The weights to sample from, so that each row keeps its draft token as often as possible.

    A draft token x, sampled with probability q(x), is kept with probability min(1, p(x) / q(x));
    otherwise the token is sampled from the residual max(p - q, 0). The result has distribution p.

    Args:
        weights: [rows, vocab] float32, proportional to p.
        drawn: the draft token of each of these rows.
        numbers: one per row, uniform in [0, 1), independent of the number that sampled the draft
            token.

    Returns:
        [rows, vocab] float32: all weight on a draft token that is kept, none on one that is not.
    """
    target = weights / weights.sum(dim=-1, keepdim=True)
    proposed, ids = drawn.distributions, drawn.token_ids.clamp(min=0).unsqueeze(1)
    bars = column(weights.device, numbers, np.float64)
    is_kept = bars * proposed.gather(1, ids) < target.gather(1, ids)
    rest = (target - proposed).clamp_(min=0.0)
    # if p equals q, the residual is zero or rounding errors
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    kept = torch.zeros_like(target).scatter_(1, ids, 1.0)
    return torch.where(is_kept, kept, rest)


def count_accepted(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """The number of leading draft tokens that equal the model's choices.

    Args:
        drafted: n draft tokens; a negative one is no token, and ends the accepted ones.
        chosen: at least n tokens; the first is at the position of the first draft token.
    """
    pairs = zip(drafted, chosen, strict=False)
    return next(
        (i for i, (token_id, choice) in enumerate(pairs) if token_id != choice or token_id < 0),
        len(drafted),
    )
