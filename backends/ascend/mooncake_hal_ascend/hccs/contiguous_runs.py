"""Plans transfers of many small pieces that are contiguous on one end, as whole runs; no I/O.

If prefill has more ranks than decode, a block of one prefill rank is contiguous in its own memory,
but a stripe per token in decode's memory. A transfer engine's cost is per piece. Therefore whole
runs are moved to a buffer on decode's side, and the NPU there scatters them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.transports.staging import packed_addresses
from mooncake_hal.transports.strided_pieces import U64

BUFFER_BYTES = 1 << 20
"""Size of a buffer. A slice of small pieces is a few times as long, and passes through two buffers
alternately."""
SMALL_BYTES = 16 << 10
"""Largest mean size of pieces that are moved as runs; larger pieces are transferred one by one."""
MIN_PIECES_PER_RUN = 8
"""Smallest mean number of pieces per run for which runs are used."""
MIN_ROW_BYTES = 32
"""Smallest row that is scattered, in bytes: what a device moves at once."""
ELEMENT_BYTES = 4
"""Size of the elements as which rows are copied."""


@dataclass(frozen=True, slots=True, eq=False)
class RunBatch:
    """Runs that fit into a buffer together, back to back.

    Args:
        starts, run_bytes: [runs] addresses and lengths of the runs.
        targets, sizes: [pieces] target addresses and lengths of their pieces.
    """

    starts: U64
    run_bytes: U64
    targets: U64
    sizes: U64

    def in_buffer(self, address: int) -> U64:
        """Addresses of the runs in a buffer at ``address``: [runs]."""
        return packed_addresses(address, self.run_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class ContiguousRuns:
    """Pieces, in the order of their runs.

    Args:
        sources, targets, sizes: [pieces] source addresses, target addresses and lengths.
    """

    sources: U64
    targets: U64
    sizes: U64

    def batches(self, max_bytes: int) -> Iterator[RunBatch]:
        """Divide the pieces into batches of at most ``max_bytes``, without dividing a piece."""
        first, ends = 0, np.cumsum(self.sizes)
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            last = max(int(np.searchsorted(ends, before + max_bytes, side="right")), first + 1)
            yield self._batch(slice(first, last))
            first = last

    def _batch(self, pieces: slice) -> RunBatch:
        sources, sizes = self.sources[pieces], self.sizes[pieces]
        starts = np.flatnonzero(_is_run_start(sources, sizes))
        run_bytes = np.add.reduceat(sizes, starts)
        return RunBatch(sources[starts], run_bytes, self.targets[pieces], sizes)


def find_runs(
    sources: U64, targets: U64, sizes: U64, base: int, max_bytes: int
) -> ContiguousRuns | None:
    """Group pieces into runs; None if transferring the pieces one by one is better.

    Args:
        sources, targets, sizes: addresses and lengths of the pieces, all of whose targets are in
            one region.
        base: address of that region.
        max_bytes: size of a buffer, which must hold any one piece.
    """
    mean_bytes = int(sizes.sum()) / len(sizes)
    num_runs = int(_is_run_start(sources, sizes).sum())
    if mean_bytes > SMALL_BYTES or len(sizes) < MIN_PIECES_PER_RUN * num_runs:
        return None
    if not is_row(row_bytes(targets, sizes, base)) or int(sizes.max()) > max_bytes:
        return None
    return ContiguousRuns(sources, targets, sizes)


def is_row(nbytes: int) -> bool:
    """Whether a device can scatter rows of this length efficiently."""
    return nbytes >= MIN_ROW_BYTES and nbytes % ELEMENT_BYTES == 0


def row_bytes(targets: U64, sizes: U64, base: int) -> int:
    """The largest common divisor of all pieces' lengths and of their offsets in the region."""
    return int(np.gcd.reduce(np.concatenate((sizes, targets - np.uint64(base)))))


def rows_of(targets: U64, sizes: U64, base: int, row: int) -> NDArray[np.int64]:
    """Indices of the target rows, of ``row`` bytes each, in the region: [rows]."""
    counts = (sizes // np.uint64(row)).astype(np.int64)
    firsts = ((targets - np.uint64(base)) // np.uint64(row)).astype(np.int64)
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    rows: NDArray[np.int64] = np.repeat(firsts, counts) + inside
    return rows


def _is_run_start(sources: U64, sizes: U64) -> NDArray[np.bool_]:
    """Whether each piece is not contiguous with the one before it: [pieces]."""
    is_start = np.ones(len(sources), np.bool_)
    is_start[1:] = sources[1:] != sources[:-1] + sizes[:-1]
    return is_start
