"""Which guesses become part of an answer: pure functions over tensors and ints.

The model chooses a token at the place of every guess, and guesses are accepted as long as they are
what it chose. That leaves the answer's distribution as it is, whatever was guessed, because what
counts is the choice. Where the guess was itself drawn from a known distribution, the choice is
made dependent on it: after Leviathan et al. 2023, which accepts most often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Guess(NamedTuple):
    """A token that may come next.

    Args:
        token_id: which.
        distribution: [vocab] float32, the probabilities it was drawn with; None if the model's own
            choice is not to depend on it.
    """

    token_id: int
    distribution: Tensor | None = None


def heed_guesses(weights: Tensor, guesses: Sequence[Guess], numbers: Sequence[float]) -> Tensor:
    """What to draw from so that each row keeps its guess as often as may be.

    A guess x, drawn with probability q(x), is kept with probability min(1, p(x) / q(x)); otherwise
    the token comes from what p has beyond q. Both together give p.

    Args:
        weights: [rows, vocab] float32, proportional to p.
        guesses: one per row, with distributions.
        numbers: one per row, uniform in [0, 1), independent of what drew the guess.

    Returns:
        [rows, vocab] float32: all weight on a guess that is kept, none on one that is not.
    """
    target = weights / weights.sum(dim=-1, keepdim=True)
    guessed = torch.stack([_known(guess) for guess in guesses])
    ids = torch.tensor([[guess.token_id] for guess in guesses], device=weights.device)
    bars = torch.tensor(numbers, dtype=torch.float64, device=weights.device).unsqueeze(1)
    is_kept = bars * guessed.gather(1, ids) < target.gather(1, ids)
    rest = (target - guessed).clamp_(min=0.0)
    # equal distributions leave nothing but rounding errors, or not even those
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    kept = torch.zeros_like(target).scatter_(1, ids, 1.0)
    return torch.where(is_kept, kept, rest)


def count_accepted(guesses: Sequence[Guess], chosen: Sequence[int]) -> int:
    """How many leading guesses are what the model chose.

    Args:
        guesses: n of them.
        chosen: at least n tokens; the first one stands at the first guess's place.
    """
    pairs = zip(guesses, chosen, strict=False)
    return next(
        (i for i, (guess, token_id) in enumerate(pairs) if guess.token_id != token_id), len(guesses)
    )


def _known(guess: Guess) -> Tensor:
    assert guess.distribution is not None, "only a guess of known probability can be tested"
    return guess.distribution
