"""How often a program that dies is started again, and when."""

from __future__ import annotations

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
_STEADY_S = 60.0
"""Who ran so long gets all its chances again."""


class Restarts:
    """The chances of one program; pure.

    Args:
        most: how many times in a row.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_in_a_row = 0

    def next_delay_s(self, ran_s: float) -> float | None:
        """How long to wait before the next start of a program that has died, each time twice as
        long as before; None if there are no chances left.

        Args:
            ran_s: how long it had run, in seconds.
        """
        if ran_s >= _STEADY_S:
            self.num_in_a_row = 0
        if self.num_in_a_row >= self.most:
            return None
        self.num_in_a_row += 1
        return float(min(_FIRST_DELAY_S * 2.0 ** (self.num_in_a_row - 1), _LONGEST_DELAY_S))
