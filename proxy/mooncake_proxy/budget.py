"""A retry budget: retries may only be a fraction of the requests."""

from __future__ import annotations


class RetryBudget:
    """Every request deposits `ratio`, every retry takes 1; `reserve` allows a few at any time.

    When instances fail one by one, all retries fit; when everything fails, traffic grows by
    `ratio` instead of multiplying (after Finagle's RetryBudget).
    """

    __slots__ = ("_balance", "_limit", "_ratio")

    def __init__(self, ratio: float, reserve: int) -> None:
        self._ratio = ratio
        self._limit = float(max(reserve, 1) * 10)
        self._balance = float(reserve)

    def deposit(self) -> None:
        """A request came."""
        balance = self._balance + self._ratio
        self._balance = balance if balance < self._limit else self._limit

    def take(self) -> bool:
        """Whether one more retry fits; takes it if so."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True
