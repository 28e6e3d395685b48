"""Dividing spans among connections. Pure."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mooncake_hal.transport import Spans

ALIGNMENT = 4096
"""Pieces are cut at multiples of this many bytes from the first one."""


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
