"""Dividing spans among connections, and cutting them into pieces. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.transport import Spans

U64 = NDArray[np.uint64]

ALIGNMENT = 4096
"""Pieces are cut at multiples of this many bytes from the first one."""


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


def split_spans(spans: Spans, parts: int) -> list[Spans]:
    """Cut spans into up to ``parts`` shares of nearly equal bytes, in order.

    A piece that lies across a cut is in both shares, in part. No share is empty.
    """
    ends = np.cumsum(spans.nbytes)
    total = int(ends[-1])
    cuts = [total * part // parts // ALIGNMENT * ALIGNMENT for part in range(1, parts)]
    edges = sorted({0, *cuts, total})
    return [_between(spans, ends, low, high) for low, high in pairwise(edges)]


def limit_spans(spans: Spans, most: int) -> list[Spans]:
    """Cut spans into runs of at most ``most`` pieces."""
    if len(spans) <= most:
        return [spans]
    return [
        Spans(
            spans.local[at : at + most], spans.remote[at : at + most], spans.nbytes[at : at + most]
        )
        for at in range(0, len(spans), most)
    ]


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


def _between(spans: Spans, ends: np.ndarray, low: int, high: int) -> Spans:
    first = int(np.searchsorted(ends, low, side="right"))
    last = int(np.searchsorted(ends, high, side="left"))
    local, remote, nbytes = (
        array[first : last + 1].copy() for array in (spans.local, spans.remote, spans.nbytes)
    )
    skipped = np.uint64(low - (int(ends[first]) - int(nbytes[0])))
    nbytes[-1] -= np.uint64(int(ends[last]) - high)
    local[0] += skipped
    remote[0] += skipped
    nbytes[0] -= skipped
    return Spans(local, remote, nbytes)
