"""Many small pieces that are contiguous on one end, moved as whole runs. Pure.

Where prefill has more ranks than decode, a block of one of its ranks is contiguous in its memory,
and a stripe per token in decode's. An engine's cost is per piece: whole runs are moved into a
buffer on decode's side, whose NPU scatters them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.transports.staging import packed_addresses
from mooncake_hal.transports.strided_pieces import U64

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


@dataclass(frozen=True, slots=True, eq=False)
class RunBatch:
    """What fits into a buffer, one run behind the other.

    Args:
        starts, run_bytes: [runs] where the runs lie, and how long they are.
        targets, sizes: [pieces] where their pieces go.
    """

    starts: U64
    run_bytes: U64
    targets: U64
    sizes: U64

    def in_buffer(self, address: int) -> U64:
        """Where the runs lie in a buffer that begins at ``address``: [runs]."""
        return packed_addresses(address, self.run_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousRuns:
    """Pieces in the order in which they lie in their runs.

    Args:
        sources, targets, sizes: [pieces] where they come from, where they go, how long they are.
    """

    sources: U64
    targets: U64
    sizes: U64

    def batches(self, most_bytes: int) -> Iterator[RunBatch]:
        """Cut into what fits into a buffer, between pieces."""
        first, ends = 0, np.cumsum(self.sizes)
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + most_bytes, side="right")), first + 1)
            yield self._batch(slice(first, last))
            first = last

    def _batch(self, pieces: slice) -> RunBatch:
        sources, sizes = self.sources[pieces], self.sizes[pieces]
        starts = np.flatnonzero(_is_run_start(sources, sizes))
        run_bytes = np.add.reduceat(sizes, starts)
        return RunBatch(sources[starts], run_bytes, self.targets[pieces], sizes)


def find_runs(
    sources: U64, targets: U64, sizes: U64, base: int, most_bytes: int
) -> ContiguousRuns | None:
    """Whether pieces are better moved by whole runs.

    Args:
        sources, targets, sizes: of the pieces, all of which go to one region.
        base: that region's first byte.
        most_bytes: of a buffer; a piece has to fit.
    """
    mean_bytes = int(sizes.sum()) / len(sizes)
    num_runs = int(_is_run_start(sources, sizes).sum())
    if mean_bytes > SMALL_BYTES or len(sizes) < LEAST_PIECES * num_runs:
        return None
    if not is_row(row_bytes(targets, sizes, base)) or int(sizes.max()) > most_bytes:
        return None
    return ContiguousRuns(sources, targets, sizes)


def is_row(nbytes: int) -> bool:
    """Whether a device can scatter rows of this length, and efficiently."""
    return nbytes >= LEAST_ROW and nbytes % ELEMENT_BYTES == 0


def row_bytes(targets: U64, sizes: U64, base: int) -> int:
    """Return what all pieces, and their targets in the region, are multiples of."""
    return int(np.gcd.reduce(np.concatenate((sizes, targets - np.uint64(base)))))


def rows_of(targets: U64, sizes: U64, base: int, row: int) -> NDArray[np.int64]:
    """Number the rows of ``row`` bytes that pieces go to, in their region: [n]."""
    counts = (sizes // np.uint64(row)).astype(np.int64)
    firsts = ((targets - np.uint64(base)) // np.uint64(row)).astype(np.int64)
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows: NDArray[np.int64] = np.repeat(firsts, counts) + inside
    return rows


def _is_run_start(sources: U64, sizes: U64) -> NDArray[np.bool_]:
    """Which pieces do not follow the one before them: [n]."""
    is_start = np.ones(len(sources), np.bool_)
    is_start[1:] = sources[1:] != sources[:-1] + sizes[:-1]
    return is_start
