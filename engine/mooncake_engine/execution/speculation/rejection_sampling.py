"""Which draft tokens are accepted: pure functions over tensors and ints.

The model chooses a token at the position of every draft token, and draft tokens are accepted as
long as they are what it chose. That leaves the output's distribution as it is, whatever was
drafted, because what counts is the choice. Where the draft token was itself drawn from a known
distribution, the choice is made dependent on it: after Leviathan et al. 2023, which accepts most
often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.execution.sampling_metadata import column


@dataclass(frozen=True, slots=True, eq=False)
class DrawnTokens:
    """Draft tokens that were drawn from known distributions; on the device.

    Args:
        rows: of the batch in which each is tested; rising.
        token_ids: [rows] int64; negative where there was nothing to draw from.
        distributions: [rows, vocab] float32, the probabilities that each was drawn with.
    """

    rows: Sequence[int]
    token_ids: Tensor
    distributions: Tensor


def rejection_weights(weights: Tensor, drawn: DrawnTokens, numbers: Sequence[float]) -> Tensor:
    """What to sample from so that each row keeps its draft token as often as possible.

    A draft token x, sampled with probability q(x), is kept with probability min(1, p(x) / q(x));
    otherwise the token comes from what p has beyond q. Both together give p.

    Args:
        weights: [rows, vocab] float32, proportional to p.
        drawn: the draft token of each of these rows.
        numbers: one per row, uniform in [0, 1), independent of what drew the draft token.

    Returns:
        [rows, vocab] float32: all weight on a draft token that is kept, none on one that is not.
    """
    target = weights / weights.sum(dim=-1, keepdim=True)
    proposed, ids = drawn.distributions, drawn.token_ids.clamp(min=0).unsqueeze(1)
    bars = column(weights.device, numbers, np.float64)
    is_kept = bars * proposed.gather(1, ids) < target.gather(1, ids)
    rest = (target - proposed).clamp_(min=0.0)
    # equal distributions leave nothing but rounding errors, or not even those
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    kept = torch.zeros_like(target).scatter_(1, ids, 1.0)
    return torch.where(is_kept, kept, rest)


def count_accepted(drafted: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading draft tokens are what the model chose.

    Args:
        drafted: n of them; a negative one is no token, and nothing behind it is accepted.
        chosen: at least n tokens; the first one is at the first draft token's position.
    """
    pairs = zip(drafted, chosen, strict=False)
    return next(
        (i for i, (token_id, choice) in enumerate(pairs) if token_id != choice or token_id < 0),
        len(drafted),
    )
