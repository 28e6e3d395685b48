"""Pieces are striped over connections, and a send window posts them in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from mooncake_hal.transports.rdma.send_window import PieceRun, SendWindow, stripe

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(sizes, st.integers(1, 8), st.data())
def test_striping_is_even(lengths: list[int], connections: int, data: st.DataObject) -> None:
    ends = np.cumsum(np.array(lengths, np.int64))
    start = data.draw(st.integers(0, len(lengths) - 1))
    stop = data.draw(st.integers(start + 1, len(lengths)))
    parts = stripe(ends, start, stop, connections)
    assert [at for low, high in parts for at in range(low, high)] == list(range(start, stop))
    assert 1 <= len(parts) <= connections
    fair = sum(lengths[start:stop]) / connections
    assert all(sum(lengths[low:high]) <= fair + max(lengths) for low, high in parts)


@dataclass(eq=False)
class Some:
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, *lengths: int) -> Some:
        return cls(np.cumsum(np.array(lengths, np.int64)))


def all_of(transfer: Some) -> PieceRun[Some]:
    return PieceRun(transfer, 0, len(transfer.ends))


def test_requests_are_numbered_and_bounded() -> None:
    window: SendWindow[Some] = SendWindow(4, 1000)
    transfer = Some.of(*[10] * 6)
    window.add(all_of(transfer))
    run = window.post_next()
    assert run is not None
    assert (run.first_id, run.start, run.stop) == (1, 0, 4)
    assert window.post_next() is None
    assert window.complete(3) == [(transfer, 3)]
    run = window.post_next()
    assert run is not None
    assert (run.first_id, run.start, run.stop) == (5, 4, 6)
    assert window.complete(6) == [(transfer, 1), (transfer, 2)]
    assert window.take_unfinished() == []


def test_bytes_are_bounded_except_for_a_single_long_piece() -> None:
    window: SendWindow[Some] = SendWindow(10, 25)
    window.add(all_of(Some.of(10, 10, 10, 100, 5)))
    posted = []
    while (run := window.post_next()) is not None:
        posted.append((run.start, run.stop))
        window.complete(run.first_id + len(run) - 1)
    assert posted == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_refills_come_in_batches() -> None:
    window: SendWindow[Some] = SendWindow(8, 1000)
    window.add(all_of(Some.of(*[1] * 20)))
    assert window.post_next(least=4) is not None
    window.complete(3)
    assert window.post_next(least=4) is None
    window.complete(4)
    run = window.post_next(least=4)
    assert run is not None
    assert len(run) == 4


def test_dropped_transfer_keeps_only_requests_in_flight() -> None:
    window: SendWindow[Some] = SendWindow(2, 1000)
    stopped, other = Some.of(1, 1, 1, 1, 1), Some.of(1, 1)
    window.add(all_of(stopped))
    window.add(all_of(other))
    assert window.post_next() is not None
    assert window.drop(stopped) == 3
    assert window.drop(stopped) == 0
    assert window.holds(stopped)
    assert window.owner_of(2) is stopped
    assert window.owner_of(3) is None
    assert window.complete(2) == [(stopped, 2)]
    assert not window.holds(stopped)
    run = window.post_next()
    assert run is not None
    assert run.transfer is other


def test_take_unfinished_returns_all_incomplete_runs() -> None:
    window: SendWindow[Some] = SendWindow(4, 1000)
    first, second = Some.of(*[1] * 3), Some.of(*[1] * 4)
    window.add(all_of(first))
    window.add(all_of(second))
    while window.post_next() is not None:
        continue
    window.complete(2)
    left = [(run.transfer, run.start, run.stop) for run in window.take_unfinished()]
    assert left == [(first, 2, 3), (second, 0, 1), (second, 1, 4)]
    assert window.take_unfinished() == []
    assert window.in_flight == 0
    window.add(PieceRun(second, 1, 4))
    run = window.post_next()
    assert run is not None
    assert run.first_id == 5, "request ids are never reused"


@settings(max_examples=200)
@given(
    st.lists(sizes, min_size=1, max_size=5),
    st.integers(1, 10),
    st.integers(1, 80),
    st.lists(st.integers(1, 10), min_size=1),
)
def test_every_piece_completes_once_and_in_order(
    lengths: list[list[int]], requests: int, nbytes: int, progress: list[int]
) -> None:
    window: SendWindow[Some] = SendWindow(requests, nbytes)
    transfers = [Some.of(*part) for part in lengths]
    for transfer in transfers:
        window.add(all_of(transfer))
    posted: list[tuple[int, int]] = []
    done = [0] * len(transfers)
    newest = completed = 0
    for step in progress * 200:
        while (run := window.post_next()) is not None:
            assert run.first_id == newest + 1
            newest += len(run)
            posted += [(transfers.index(run.transfer), at) for at in range(run.start, run.stop)]
            assert window.in_flight <= requests
        completed = min(newest, completed + step)
        for transfer, count in window.complete(completed):
            done[transfers.index(transfer)] += count
        if done == [len(part) for part in lengths]:
            break
    assert posted == [(at, piece) for at, part in enumerate(lengths) for piece in range(len(part))]
    assert done == [len(part) for part in lengths]


def test_an_empty_window_posts_nothing() -> None:
    window: SendWindow[Some] = SendWindow(4, 100)
    assert window.post_next() is None
    assert window.complete(0) == []
    with pytest.raises(IndexError):
        window.take_unfinished()[0]
