"""Cutting spans into pieces and sharing pieces out among queue pairs. Pure."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]


class Pieces(NamedTuple):
    """Spans cut to at most a given length: four arrays of equal length.

    Args:
        local, remote, nbytes: as in ``Spans``.
        span: [n] which span each piece comes from.
    """

    local: U64
    remote: U64
    nbytes: U64
    span: NDArray[np.intp]


def cut(local: U64, remote: U64, nbytes: U64, limit: int) -> Pieces:
    """Cut spans into pieces of at most ``limit`` bytes, in order; all arrays are [n]."""
    size = np.uint64(limit)
    if int(nbytes.max(initial=0)) <= limit:
        return Pieces(local, remote, nbytes, np.arange(len(nbytes)))
    counts = ((nbytes + (size - np.uint64(1))) // size).astype(np.intp)
    span = np.repeat(np.arange(len(nbytes)), counts)
    firsts = np.cumsum(counts) - counts
    offset = (np.arange(len(span)) - firsts[span]).astype(np.uint64) * size
    return Pieces(
        local[span] + offset,
        remote[span] + offset,
        np.minimum(nbytes[span] - offset, size),
        span,
    )


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
