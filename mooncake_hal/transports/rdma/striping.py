"""Sharing pieces out among queue pairs. Pure."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray


def share_out(ends: NDArray[np.int64], start: int, stop: int, lanes: int) -> list[tuple[int, int]]:
    """Divide pieces ``start`` to ``stop`` into consecutive runs of about equal bytes.

    Args:
        ends: [n] bytes of all pieces up to and including each.
        start, stop: which pieces.
        lanes: how many runs are wanted; fewer come back where there are fewer pieces.

    Returns:
        (first, last + 1) of each run, in order, none of them empty.
    """
    before = int(ends[start - 1]) if start else 0
    total = int(ends[stop - 1]) - before
    marks = before + np.arange(1, lanes, dtype=np.int64) * total // lanes
    inner = np.searchsorted(ends[start:stop], marks, side="left") + start + 1
    edges = [start, *np.minimum(inner, stop).tolist(), stop]
    return [(low, high) for low, high in itertools.pairwise(edges) if high > low]
