"""Which draft tokens are accepted: pure functions over tensors and ints.

The model chooses a token at the position of every draft token, and draft tokens are accepted as
long as they are what it chose. That leaves the output's distribution as it is, whatever was
drafted, because what counts is the choice. Where the draft token was itself drawn from a known
distribution, the choice is made dependent on it: after Leviathan et al. 2023, which accepts most
often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class DraftToken(NamedTuple):
    """A token that may come next.

    Args:
        token_id: which.
        distribution: [vocab] float32, the probabilities it was sampled with; None if the model's
            own choice is not to depend on it.
    """

    token_id: int
    distribution: Tensor | None = None


def rejection_weights(
    weights: Tensor, draft_tokens: Sequence[DraftToken], numbers: Sequence[float]
) -> Tensor:
    """What to sample from so that each row keeps its draft token as often as possible.

    A draft token x, sampled with probability q(x), is kept with probability min(1, p(x) / q(x));
    otherwise the token comes from what p has beyond q. Both together give p.

    Args:
        weights: [rows, vocab] float32, proportional to p.
        draft_tokens: one per row, with distributions.
        numbers: one per row, uniform in [0, 1), independent of what drew the draft token.

    Returns:
        [rows, vocab] float32: all weight on a draft token that is kept, none on one that is not.
    """
    target = weights / weights.sum(dim=-1, keepdim=True)
    proposed = torch.stack([_known(draft_token) for draft_token in draft_tokens])
    ids = torch.tensor([[token.token_id] for token in draft_tokens], device=weights.device)
    bars = torch.tensor(numbers, dtype=torch.float64, device=weights.device).unsqueeze(1)
    is_kept = bars * proposed.gather(1, ids) < target.gather(1, ids)
    rest = (target - proposed).clamp_(min=0.0)
    # equal distributions leave nothing but rounding errors, or not even those
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    kept = torch.zeros_like(target).scatter_(1, ids, 1.0)
    return torch.where(is_kept, kept, rest)


def count_accepted(draft_tokens: Sequence[DraftToken], chosen: Sequence[int]) -> int:
    """How many leading draft tokens are what the model chose.

    Args:
        draft_tokens: n of them.
        chosen: at least n tokens; the first one is at the first draft token's position.
    """
    pairs = zip(draft_tokens, chosen, strict=False)
    return next(
        (i for i, (draft_token, token_id) in enumerate(pairs) if draft_token.token_id != token_id),
        len(draft_tokens),
    )


def _known(draft_token: DraftToken) -> Tensor:
    assert draft_token.distribution is not None, "only a token of known probability can be tested"
    return draft_token.distribution
