"""Many small pieces that lie together on one end, moved as the whole runs that they are. Pure.

Where prefill has more ranks than decode, a block of one of its ranks is whole in its memory, and a
stripe per token in decode's. An engine's cost is per piece: whole runs are moved into a buffer on
decode's side, whose NPU spreads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BUFFER_BYTES = 1 << 20
"""A slice of small pieces is a few times as long, and goes through two of them in turns."""
SMALL_BYTES = 16 << 10
"""Of a piece, on average; larger ones are worth their own transfer."""
LEAST_PIECES = 8
"""Per run, on average."""
LEAST_ROW = 32
"""Bytes that a device moves at once."""
ELEMENT_BYTES = 4
"""Rows are copied as elements of this size."""

U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What fits into a buffer, one run behind the other.

    Args:
        starts, run_bytes: [runs] where the runs lie, and how long they are.
        places, sizes: [pieces] where their pieces go.
    """

    starts: U64
    run_bytes: U64
    places: U64
    sizes: U64

    def in_buffer(self, address: int) -> U64:
        """Where the runs lie in a buffer that begins at ``address``: [runs]."""
        begins: U64 = np.cumsum(self.run_bytes) - self.run_bytes + np.uint64(address)
        return begins


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Pieces in the order in which they lie in their runs.

    Args:
        origins, places, sizes: [pieces] where they come from, where they go, how long they are.
    """

    origins: U64
    places: U64
    sizes: U64

    def batches(self, most_bytes: int) -> Iterator[Batch]:
        """Cut into what fits into a buffer, between pieces."""
        first, ends = 0, np.cumsum(self.sizes)
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + most_bytes, side="right")), first + 1)
            yield self._batch(slice(first, last))
            first = last

    def _batch(self, pieces: slice) -> Batch:
        origins, sizes = self.origins[pieces], self.sizes[pieces]
        starts = np.flatnonzero(_is_run_start(origins, sizes))
        run_bytes = np.add.reduceat(sizes, starts)
        return Batch(origins[starts], run_bytes, self.places[pieces], sizes)


def find_runs(origins: U64, places: U64, sizes: U64, base: int, most_bytes: int) -> Runs | None:
    """Whether pieces are better moved by whole runs.

    Args:
        origins, places, sizes: of the pieces, all of which go to one region.
        base: that region's first byte.
        most_bytes: of a buffer; a piece has to fit.
    """
    mean_bytes = int(sizes.sum()) / len(sizes)
    num_runs = int(_is_run_start(origins, sizes).sum())
    if mean_bytes > SMALL_BYTES or len(sizes) < LEAST_PIECES * num_runs:
        return None
    if not is_row(row_bytes(places, sizes, base)) or int(sizes.max()) > most_bytes:
        return None
    return Runs(origins, places, sizes)


def is_row(nbytes: int) -> bool:
    """Whether a device spreads rows of so many bytes, and well."""
    return nbytes >= LEAST_ROW and nbytes % ELEMENT_BYTES == 0


def row_bytes(places: U64, sizes: U64, base: int) -> int:
    """Return what all pieces, and their places in the region, are multiples of."""
    return int(np.gcd.reduce(np.concatenate((sizes, places - np.uint64(base)))))


def rows_of(places: U64, sizes: U64, base: int, row: int) -> NDArray[np.int64]:
    """Number the rows of ``row`` bytes that pieces go to, in their region: [n]."""
    counts = (sizes // np.uint64(row)).astype(np.int64)
    firsts = ((places - np.uint64(base)) // np.uint64(row)).astype(np.int64)
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows: NDArray[np.int64] = np.repeat(firsts, counts) + inside
    return rows


def _is_run_start(origins: U64, sizes: U64) -> NDArray[np.bool_]:
    """Which pieces do not follow the one before them: [n]."""
    is_start = np.ones(len(origins), np.bool_)
    is_start[1:] = origins[1:] != origins[:-1] + sizes[:-1]
    return is_start
