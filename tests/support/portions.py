"""Runs generators that apply a change in portions to completion."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def apply_all(portions: Generator[None, None, T]) -> T:
    """Return the value that the generator returns."""
    while True:
        try:
            next(portions)
        except StopIteration as end:
            return end.value
