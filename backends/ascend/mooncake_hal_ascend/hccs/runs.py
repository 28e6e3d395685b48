"""Many small pieces that lie together on the other end, read as what they are there. Pure.

Where prefill has more ranks than decode, a block of one of its ranks is whole in its memory, and a
stripe per token in decode's. An engine's cost is per piece: whole runs are read into a buffer, and
the device spreads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.transport import Spans

STAGING_BYTES = 2 << 20
"""Of two buffers: a slice of small pieces is a few times as long, and goes through in turns."""
SMALL_BYTES = 16 << 10
"""Of a piece, on average; larger ones are worth their own transfer."""
LEAST_PIECES = 8
"""Per run, on average."""
LEAST_ROW = 32
"""Bytes that a device moves at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What fits into a buffer.

    Args:
        remote, nbytes: [runs] uint64, what to read, one run behind the other.
        rows: [n] int64, where the buffer's rows go, in rows of the local region.
    """

    remote: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    rows: NDArray[np.int64]

    def spans_into(self, address: int) -> Spans:
        """The runs, read to that address."""
        offsets = np.cumsum(self.nbytes) - self.nbytes
        return Spans(offsets + np.uint64(address), self.remote, self.nbytes)


@dataclass(frozen=True, slots=True)
class Runs:
    """A read by whole runs.

    Args:
        spans: the pieces.
        base: first byte of the local region.
        row_bytes: what all pieces, and their places in the region, are multiples of.
    """

    spans: Spans
    base: int
    row_bytes: int

    def batches(self, most_bytes: int) -> Iterator[Batch]:
        """Cut into what fits into a buffer, between pieces."""
        first, ends = 0, np.cumsum(self.spans.nbytes)
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + most_bytes, side="right")), first + 1)
            yield self._batch(slice(first, last))
            first = last

    def _batch(self, pieces: slice) -> Batch:
        remote, nbytes = self.spans.remote[pieces], self.spans.nbytes[pieces]
        starts = np.flatnonzero(_is_run_start(remote, nbytes))
        counts = (nbytes // np.uint64(self.row_bytes)).astype(np.int64)
        at = (self.spans.local[pieces] - np.uint64(self.base)) // np.uint64(self.row_bytes)
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(at.astype(np.int64), counts) + inside
        return Batch(remote[starts], np.add.reduceat(nbytes, starts), rows)


def find_runs(spans: Spans, base: int, most_bytes: int) -> Runs | None:
    """Whether a read is better made by whole runs.

    Args:
        spans: the pieces, all in one local region.
        base: the region's first byte.
        most_bytes: of a buffer; a piece has to fit.
    """
    mean_bytes = spans.total_bytes / len(spans)
    num_runs = int(_is_run_start(spans.remote, spans.nbytes).sum())
    if mean_bytes > SMALL_BYTES or len(spans) < LEAST_PIECES * num_runs:
        return None
    places = np.concatenate((spans.nbytes, spans.local - np.uint64(base)))
    row_bytes = int(np.gcd.reduce(places))
    if row_bytes < LEAST_ROW or int(spans.nbytes.max()) > most_bytes:
        return None
    return Runs(spans, base, row_bytes)


def _is_run_start(
    remote: NDArray[np.uint64],  # [n]
    nbytes: NDArray[np.uint64],  # [n]
) -> NDArray[np.bool_]:
    """Which pieces do not follow the one before them: [n]."""
    is_start = np.ones(len(remote), np.bool_)
    is_start[1:] = remote[1:] != remote[:-1] + nbytes[:-1]
    return is_start
