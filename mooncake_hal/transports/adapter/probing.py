"""What is installed, without importing it. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


def installed(distributions: Sequence[str]) -> str | None:
    """Return the first of the distributions that is installed, with its version."""
    for name in distributions:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None
