"""How many tokens of a sequence are worth guessing, by what became of its last guesses.

Two more after guesses that all came true, one less after others (the heuristic of Hugging Face's
assisted generation); where the last one left does not come true either, none for a while, and for
ever longer. It looks at that sequence's past alone, whoever else runs. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LONGEST_REST = 16
"""Tokens without guesses, at most: where nothing can be guessed, one in so many is computed in
vain."""


@dataclass(slots=True)
class GuessLength:
    """One sequence's.

    Args:
        limit: most guesses in a step; it begins with that.
    """

    limit: int
    _length: int = field(init=False)
    _rest: int = 1
    _resumes_at: int = 0

    def __post_init__(self) -> None:
        self._length = self.limit

    def at(self, num_tokens: int) -> int:
        """Guesses worth trying behind so many tokens."""
        return self._length if num_tokens >= self._resumes_at else 0

    def learn(self, num_guessed: int, num_accepted: int, num_tokens: int) -> None:
        """Take in what became of guesses.

        Args:
            num_guessed: so many were run; with none there is nothing to learn.
            num_accepted: so many of them, the first ones, came true.
            num_tokens: of the sequence, now.
        """
        if not num_guessed:
            return
        if num_accepted:
            self._rest = 1
        elif self._length == 1:
            self._resumes_at = num_tokens + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        change = 2 if num_accepted == num_guessed else -1
        self._length = min(max(self._length + change, 1), self.limit)
