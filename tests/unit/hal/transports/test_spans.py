"""Splitting and cutting spans: no byte is lost or duplicated, and no part is empty."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from mooncake_hal.transport import Spans
from mooncake_hal.transports.spans import (
    ALIGNMENT,
    IOV_MAX,
    cut,
    gather,
    limit_spans,
    scatter,
    split_spans,
    vectors,
)

SHORT_SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=30)
SIZES = st.lists(st.integers(1, 3 * ALIGNMENT), min_size=1, max_size=40)


def spans_of(sizes: list[int]) -> Spans:
    nbytes = np.array(sizes, np.uint64)
    starts = np.cumsum(nbytes + np.uint64(7)) - nbytes
    return Spans(starts + np.uint64(10**6), starts[::-1] + np.uint64(10**9), nbytes)


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def moves(spans: Spans) -> list[tuple[int, int]]:
    """Return every (local byte, remote byte) pair that the spans move, in order."""
    found = []
    for local, remote, size in zip(
        spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist(), strict=True
    ):
        found += zip(range(local, local + size), range(remote, remote + size), strict=True)
    return found


@given(SIZES, st.integers(1, 5))
def test_split_covers_exactly(sizes: list[int], parts: int) -> None:
    spans = spans_of(sizes)
    shares = split_spans(spans, parts)
    assert 1 <= len(shares) <= parts
    assert all(share.nbytes.all() for share in shares)
    assert [pair for share in shares for pair in moves(share)] == moves(spans)


@given(st.integers(2, 8))
def test_shares_are_nearly_equal(parts: int) -> None:
    shares = split_spans(spans_of([100 * ALIGNMENT * parts]), parts)
    assert [share.total_bytes for share in shares] == [100 * ALIGNMENT] * parts


def test_split_does_not_modify_its_input() -> None:
    spans = spans_of([3 * ALIGNMENT])
    before = moves(spans)
    split_spans(spans, 3)
    assert moves(spans) == before


@given(SIZES, st.integers(1, 7))
def test_limit_covers_exactly(sizes: list[int], most: int) -> None:
    spans = spans_of(sizes)
    runs = limit_spans(spans, most)
    assert all(0 < len(run) <= most for run in runs)
    assert [pair for run in runs for pair in moves(run)] == moves(spans)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 100))
def test_vectors_are_filled_and_cover_exactly(sizes: list[int], most: int) -> None:
    spans = spans_of(sizes)
    found = list(vectors(spans.local, spans.nbytes, most))
    totals = [int(vector[:, 1].sum()) for vector in found]
    assert all(total == most for total in totals[:-1])
    assert 0 < totals[-1] <= most
    cells = [a + i for vector in found for a, n in vector.tolist() for i in range(n)]
    assert cells == [local for local, _ in moves(spans)]


def test_vectors_are_at_most_iov_max_long() -> None:
    count = 2 * IOV_MAX + 3
    sizes = np.full(count, 2, np.uint64)
    found = list(vectors(np.arange(count, dtype=np.uint64), sizes, 10**9))
    assert [len(vector) for vector in found] == [IOV_MAX, IOV_MAX, 3]


def test_gather_and_scatter_round_trip() -> None:
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 256, 5000, np.uint8)
    before = memory.copy()
    offsets = rng.permutation(100) * 50
    addresses = (offsets + memory.ctypes.data).astype(np.uint64)
    (vector,) = vectors(addresses, np.full(100, 33, np.uint64), 10**6)
    flat = np.empty(3300, np.uint8)
    gather(vector, flat)
    wanted = np.concatenate([before[offset : offset + 33] for offset in offsets])
    assert (flat == wanted).all()
    memory[:] = 0
    scatter(flat, vector)
    expected = np.zeros(5000, np.uint8)
    for offset in offsets:
        expected[offset : offset + 33] = before[offset : offset + 33]
    assert (memory == expected).all()


def test_short_spans_are_not_cut() -> None:
    local, remote, nbytes = u64(0, 100), u64(50, 0), u64(8, 4)
    pieces = cut(local, remote, nbytes, 8)
    assert pieces.local is local
    assert pieces.span.tolist() == [0, 1]


def test_long_spans_are_cut_in_order() -> None:
    pieces = cut(u64(100, 500, 900), u64(1000, 0, 7), u64(20, 8, 9), 8)
    assert pieces.local.tolist() == [100, 108, 116, 500, 900, 908]
    assert pieces.remote.tolist() == [1000, 1008, 1016, 0, 7, 15]
    assert pieces.nbytes.tolist() == [8, 8, 4, 8, 8, 1]
    assert pieces.span.tolist() == [0, 0, 0, 1, 2, 2]


def test_cutting_works_at_the_end_of_the_address_space() -> None:
    pieces = cut(u64(2**64 - 16), u64(0), u64(16), 8)
    assert pieces.local.tolist() == [2**64 - 16, 2**64 - 8]


@given(SHORT_SIZES, st.integers(1, 60))
def test_pieces_cover_their_spans(lengths: list[int], limit: int) -> None:
    ends = np.cumsum(lengths)
    starts = (ends - lengths).astype(np.uint64)
    pieces = cut(starts, starts + np.uint64(1000), u64(*lengths), limit)
    assert pieces.nbytes.max() <= limit
    assert pieces.nbytes.min() >= 1
    # the spans are contiguous here, so all pieces are, too
    assert (np.cumsum(pieces.nbytes) - pieces.nbytes == pieces.local).all()
    assert int(pieces.nbytes.sum()) == sum(lengths)
    assert (pieces.remote - pieces.local == 1000).all()
