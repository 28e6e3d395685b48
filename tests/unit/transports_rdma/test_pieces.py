"""Spans become pieces, pieces become runs on lanes, and a window keeps them in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from mooncake_hal.transports.rdma.striping import share_out
from mooncake_hal.transports.rdma.window import Run, Window
from mooncake_hal.transports.splitting import cut

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def u64(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


# -- cutting --------------------------------------------------------------------------------------


def test_short_spans_are_left_whole() -> None:
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


def test_addresses_at_the_end_of_the_address_space() -> None:
    pieces = cut(u64(2**64 - 16), u64(0), u64(16), 8)
    assert pieces.local.tolist() == [2**64 - 16, 2**64 - 8]


@given(sizes, st.integers(1, 60))
def test_pieces_make_up_their_spans(lengths: list[int], limit: int) -> None:
    ends = np.cumsum(lengths)
    starts = (ends - lengths).astype(np.uint64)
    pieces = cut(starts, starts + np.uint64(1000), u64(*lengths), limit)
    assert pieces.nbytes.max() <= limit
    assert pieces.nbytes.min() >= 1
    # spans lie one after the other here, so all pieces do too
    assert (np.cumsum(pieces.nbytes) - pieces.nbytes == pieces.local).all()
    assert int(pieces.nbytes.sum()) == sum(lengths)
    assert (pieces.remote - pieces.local == 1000).all()


# -- sharing out ----------------------------------------------------------------------------------


@given(sizes, st.integers(1, 8), st.data())
def test_lanes_share_evenly(lengths: list[int], lanes: int, data: st.DataObject) -> None:
    ends = np.cumsum(np.array(lengths, np.int64))
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    parts = share_out(ends, start, stop, lanes)
    assert [at for low, high in parts for at in range(low, high)] == list(range(start, stop))
    assert 1 <= len(parts) <= lanes
    fair = sum(lengths[start:stop]) / lanes
    assert all(sum(lengths[low:high]) <= fair + max(lengths) for low, high in parts)


# -- the window -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Some:
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, *lengths: int) -> Some:
        return cls(np.cumsum(np.array(lengths, np.int64)))


def all_of(load: Some) -> Run[Some]:
    return Run(load, 0, len(load.ends))


def test_requests_are_numbered_and_bounded() -> None:
    window: Window[Some] = Window(4, 1000)
    load = Some.of(*[10] * 6)
    window.add(all_of(load))
    run = window.post_next()
    assert run is not None
    assert (run.first_id, run.start, run.stop) == (1, 0, 4)
    assert window.post_next() is None
    assert window.complete(3) == [(load, 3)]
    run = window.post_next()
    assert run is not None
    assert (run.first_id, run.start, run.stop) == (5, 4, 6)
    assert window.complete(6) == [(load, 1), (load, 2)]
    assert window.is_idle


def test_bytes_are_bounded_but_a_long_piece_goes_alone() -> None:
    window: Window[Some] = Window(10, 25)
    window.add(all_of(Some.of(10, 10, 10, 100, 5)))
    posted = []
    while (run := window.post_next()) is not None:
        posted.append((run.start, run.stop))
        window.complete(run.first_id + len(run) - 1)
    assert posted == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_refills_come_in_batches() -> None:
    window: Window[Some] = Window(8, 1000)
    window.add(all_of(Some.of(*[1] * 20)))
    assert window.post_next(least=4) is not None
    window.complete(3)
    assert window.post_next(least=4) is None
    window.complete(4)
    run = window.post_next(least=4)
    assert run is not None
    assert len(run) == 4


def test_a_stopped_load_keeps_what_is_in_flight_only() -> None:
    window: Window[Some] = Window(2, 1000)
    stopped, other = Some.of(1, 1, 1, 1, 1), Some.of(1, 1)
    window.add(all_of(stopped))
    window.add(all_of(other))
    assert window.post_next() is not None
    assert window.drop(stopped) == 3
    assert window.drop(stopped) == 0
    assert window.holds(stopped)
    assert window.culprit(2) is stopped
    assert window.culprit(3) is None
    assert window.complete(2) == [(stopped, 2)]
    assert not window.holds(stopped)
    run = window.post_next()
    assert run is not None
    assert run.load is other


def test_rewinding_gives_back_all_that_is_not_done() -> None:
    window: Window[Some] = Window(4, 1000)
    first, second = Some.of(*[1] * 3), Some.of(*[1] * 4)
    window.add(all_of(first))
    window.add(all_of(second))
    while window.post_next() is not None:
        continue
    window.complete(2)
    left = [(run.load, run.start, run.stop) for run in window.rewind()]
    assert left == [(first, 2, 3), (second, 0, 1), (second, 1, 4)]
    assert window.is_idle
    assert window.in_flight == 0
    window.add(Run(second, 1, 4))
    run = window.post_next()
    assert run is not None
    assert run.first_id == 5, "numbers are never used twice"


@settings(max_examples=200)
@given(
    st.lists(sizes, min_size=1, max_size=5),
    st.integers(1, 10),
    st.integers(1, 80),
    st.lists(st.integers(1, 10), min_size=1),
)
def test_every_piece_is_done_once_and_in_order(
    lengths: list[list[int]], requests: int, nbytes: int, progress: list[int]
) -> None:
    window: Window[Some] = Window(requests, nbytes)
    loads = [Some.of(*part) for part in lengths]
    for load in loads:
        window.add(all_of(load))
    posted: list[tuple[int, int]] = []
    done = [0] * len(loads)
    newest = completed = 0
    for step in progress * 200:
        while (run := window.post_next()) is not None:
            assert run.first_id == newest + 1
            newest += len(run)
            posted += [(loads.index(run.load), at) for at in range(run.start, run.stop)]
            assert window.in_flight <= requests
        completed = min(newest, completed + step)
        for load, count in window.complete(completed):
            done[loads.index(load)] += count
        if window.is_idle:
            break
    assert posted == [(at, piece) for at, part in enumerate(lengths) for piece in range(len(part))]
    assert done == [len(part) for part in lengths]


def test_an_empty_window_posts_nothing() -> None:
    window: Window[Some] = Window(4, 100)
    assert window.post_next() is None
    assert window.complete(0) == []
    with pytest.raises(IndexError):
        window.rewind()[0]
