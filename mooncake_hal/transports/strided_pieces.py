"""A compact encoding of pieces for another process: equal pieces at equal steps become one row.
Pure.

Two devices whose layouts differ exchange pieces of one head and token, 256 bytes or less, of which
a prompt has hundreds of thousands. The addresses and lengths of all of them would add 6 % to the KV
itself. But the pieces' positions follow from a few strides, those of tokens, heads, layers and
consecutive blocks. A row has the address and the length of its first piece, and up to MAX_LEVELS
counts and steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Rows = NDArray[np.uint64]
"""[rows, 2 + 2 * levels]: address, nbytes, then count and step of each level, the innermost first.
Steps are modulo 2^64, so that they can be negative."""

MAX_LEVELS = 3
LARGE_BYTES = 16 << 10
"""Pieces of at least this average size are not folded: their addresses and lengths are only a
thousandth of the data."""
FEW_PIECES = 16
"""At most this many pieces are not folded either: folding would take longer than it saves."""
_WORTH_FOLDING = 0.75
"""Folding stops at a level that leaves more than this fraction of the rows: the pieces are
irregular then."""


def pack_strides(addresses: U64, nbytes: U64) -> Rows:
    """Encode pieces, in their order, in as few words as possible.

    Args:
        addresses, nbytes: [pieces], at least one.
    """
    columns = shortest = [addresses, nbytes]
    if len(nbytes) > FEW_PIECES and int(nbytes.sum()) < LARGE_BYTES * len(nbytes):
        for _ in range(MAX_LEVELS):
            folded = _fold(columns)
            if len(folded[0]) > _WORTH_FOLDING * len(columns[0]):
                break
            columns = folded
            shortest = min(shortest, columns, key=_num_words)
    return np.stack(shortest, axis=1)


def unpack_strides(data: bytes, levels: int, max_count: int) -> tuple[U64, U64]:
    """Decode and validate rows from another process: [pieces] addresses and lengths.

    Args:
        data: the rows as bytes.
        levels: number of levels of the rows.
        max_count: maximum number of pieces.

    Raises:
        ValueError: the rows are malformed, or have more than ``max_count`` pieces.
    """
    width = 2 + 2 * levels
    if not 0 <= levels <= MAX_LEVELS or not data or len(data) % (8 * width):
        raise ValueError(f"{len(data)} bytes are no rows of {levels} levels")
    rows: Rows = np.frombuffer(data, np.uint64).reshape(-1, width)
    counts = rows[:, 2::2]
    if len(rows) > max_count or (counts > max_count).any() or not counts.all():
        raise ValueError(f"rows are of 1 to {max_count} pieces each")
    pieces = counts.prod(axis=1, dtype=np.uint64)  # below 2^64: there are three counts at most
    if (pieces > max_count).any() or pieces.sum() > max_count:
        raise ValueError(f"{max_count} pieces at most are described at once")
    for _ in range(levels):
        rows = _unfold(rows)
    return rows[:, 0].copy(), rows[:, 1].copy()


def num_levels(rows: Rows) -> int:
    """Number of levels of rows."""
    return int(rows.shape[1] - 2) // 2


def _fold(columns: list[U64]) -> list[U64]:
    """Add one level: the columns of rows that each stand for a run of rows at a constant step.

    A run begins at the first row and wherever the previous run ended. So whether a run ends after a
    row depends on whether one ended after the row before it: where several consecutive steps differ
    from the step before them, runs end at every second one.
    """
    addresses, *alike = columns
    steps = np.diff(addresses)
    must_end = np.zeros(len(steps), np.bool_)
    for column in alike:
        must_end |= column[1:] != column[:-1]
    may_end = np.zeros(len(steps), np.bool_)
    may_end[1:] = (steps[1:] != steps[:-1]) & ~must_end[1:]
    at = np.arange(len(steps))
    before = np.maximum.accumulate(np.where(may_end, 0, at))  # the last row that may not end a run
    is_odd = (at - before) & 1 == 1
    ends = must_end | (may_end & (is_odd != must_end[before]))
    heads = np.flatnonzero(np.concatenate(([True], ends)))
    counts = np.diff(heads, append=len(addresses)).astype(np.uint64)
    first_steps = np.append(steps, np.uint64(0))[heads]
    first_steps[counts == 1] = 0
    return [*(column[heads] for column in columns), counts, first_steps]


def _num_words(columns: list[U64]) -> int:
    return len(columns) * len(columns[0])


def _unfold(rows: Rows) -> Rows:
    """Remove one level: expand every row along its outermost count and step."""
    counts, steps = rows[:, -2].astype(np.int64), rows[:, -1]
    firsts = np.cumsum(counts) - counts
    inside = (np.arange(counts.sum()) - np.repeat(firsts, counts)).astype(np.uint64)
    longer = np.repeat(rows[:, :-2], counts, axis=0)
    longer[:, 0] += inside * np.repeat(steps, counts)
    return longer
