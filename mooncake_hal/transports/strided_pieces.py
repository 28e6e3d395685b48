"""Pieces as they are described to another process: equal pieces at equal steps are one row. Pure.

Two devices whose layouts differ exchange pieces of one head and token, 256 bytes or less, of which
a prompt has hundreds of thousands. Address and length of each would be 6 % of the KV itself. But
the pieces lie where a few strides say: of tokens, heads, layers, blocks that follow each other.
A row has the address and the length of its first piece, and up to MAX_LEVELS counts and steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Rows = NDArray[np.uint64]
"""[rows, 2 + 2 * levels]: address, nbytes, then count and step of each level, the innermost first.
Steps are modulo 2^64, so that they may go backwards."""

MAX_LEVELS = 3
LARGE_BYTES = 16 << 10
"""Pieces of this size on average are described one by one: that is a thousandth of them."""
FEW_PIECES = 16
"""As many at most are described one by one, too: rows would take longer than they save."""
_WORTH_FOLDING = 0.75
"""Of the rows before; where more are left, the pieces lie anyhow."""


def pack_strides(addresses: U64, nbytes: U64) -> Rows:
    """The shortest rows that describe pieces, in their order.

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


def unpack_strides(data: bytes, levels: int, most: int) -> tuple[U64, U64]:
    """Pieces of rows that somebody else has packed: [pieces] addresses and lengths.

    Args:
        data: the rows.
        levels: of the rows.
        most: pieces.

    Raises:
        ValueError: these are no rows, or of more pieces.
    """
    width = 2 + 2 * levels
    if not 0 <= levels <= MAX_LEVELS or not data or len(data) % (8 * width):
        raise ValueError(f"{len(data)} bytes are no rows of {levels} levels")
    rows: Rows = np.frombuffer(data, np.uint64).reshape(-1, width)
    counts = rows[:, 2::2]
    if len(rows) > most or (counts > most).any() or not counts.all():
        raise ValueError(f"rows are of 1 to {most} pieces each")
    pieces = counts.prod(axis=1, dtype=np.uint64)  # below 2^64: there are three counts at most
    if (pieces > most).any() or pieces.sum() > most:
        raise ValueError(f"{most} pieces at most are described at once")
    for _ in range(levels):
        rows = _unfold(rows)
    return rows[:, 0].copy(), rows[:, 1].copy()


def num_levels(rows: Rows) -> int:
    """Counts and steps of a row."""
    return int(rows.shape[1] - 2) // 2


def _fold(columns: list[U64]) -> list[U64]:
    """Columns of one level more, with a row for each run of rows that differ by a constant step.

    A run begins at the first row and where one has ended. So whether it ends behind a row depends
    on whether one has ended behind the row before: where several steps in a row differ from the one
    before them, runs end at every second of them.
    """
    addresses, *alike = columns
    steps = np.diff(addresses)
    must_end = np.zeros(len(steps), np.bool_)
    for column in alike:
        must_end |= column[1:] != column[:-1]
    may_end = np.zeros(len(steps), np.bool_)
    may_end[1:] = (steps[1:] != steps[:-1]) & ~must_end[1:]
    at = np.arange(len(steps))
    before = np.maximum.accumulate(np.where(may_end, 0, at))  # the last that may not
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
    """Rows of one level less."""
    counts, steps = rows[:, -2].astype(np.int64), rows[:, -1]
    firsts = np.cumsum(counts) - counts
    inside = (np.arange(counts.sum()) - np.repeat(firsts, counts)).astype(np.uint64)
    longer = np.repeat(rows[:, :-2], counts, axis=0)
    longer[:, 0] += inside * np.repeat(steps, counts)
    return longer
