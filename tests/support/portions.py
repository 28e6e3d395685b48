"""What is applied in portions, at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def apply_all(portions: Generator[None, None, T]) -> T:
    """Returns what they lead to."""
    while True:
        try:
            next(portions)
        except StopIteration as end:
            return end.value
