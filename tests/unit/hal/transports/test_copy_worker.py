"""How the copy worker splits transfers into parts, overlaps them, and drains them on errors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from mooncake_hal.errors import TransferCancelled, TransferError
from mooncake_hal.transport import Spans, TransferState
from mooncake_hal.transports import copy_worker
from mooncake_hal.transports.copy_worker import (
    Copier,
    CopyJob,
    CopyWorker,
    InFlightPart,
    PartMover,
    split_parts,
)
from mooncake_hal.transports.staged.staged_peer import joined
from mooncake_hal.transports.staged.staged_transport import NullCopier
from mooncake_hal.transports.staging import packed_addresses


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    ("nbytes", "parts"),
    [
        ((10,), [(0, 1)]),
        ((10, 10), [(0, 1), (1, 2)]),
        ((4, 6, 1), [(0, 2), (2, 3)]),
        ((3, 3, 3, 3), [(0, 3), (3, 4)]),
    ],
)
def test_parts_are_filled_up_to_the_limit(
    nbytes: tuple[int, ...], parts: list[tuple[int, int]]
) -> None:
    assert split_parts(numbers(*nbytes), 10) == parts


def test_number_of_pieces_per_part_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_worker, "MAX_PIECES", 2)
    assert split_parts(numbers(1, 1, 1), 10) == [(0, 2), (2, 3)]


def test_pieces_packed_on_both_sides_become_one_span() -> None:
    nbytes = numbers(3, 5, 2)
    whole = joined(packed_addresses(100, nbytes), packed_addresses(900, nbytes), nbytes)
    assert (len(whole), whole.total_bytes) == (1, 10)
    apart = joined(packed_addresses(100, nbytes), numbers(900, 950, 990), nbytes)
    assert apart.remote.tolist() == [900, 950, 990]


class Line:
    """Records the events of parts; the part that begins at ``fails_at`` fails."""

    def __init__(self, fails_at: int = -1) -> None:
        self.events: list[str] = []
        self.stop: Callable[[], None] = lambda: None
        self._fails_at = fails_at

    def __call__(self, part: Spans, deadline: float, copier: Copier) -> InFlightPart:
        name = int(part.local[0])
        self.events.append(f"begin {name}")
        self.stop()

        def finish() -> None:
            if name == self._fails_at:
                raise TransferError("lost")
            self.events.append(f"finish {name}")

        return InFlightPart(finish, lambda: self.events.append(f"drain {name}"))

    def confirm(self, spans: Spans, deadline: float) -> None:
        self.events.append(f"confirm {len(spans)}")


def job_of(line: Line) -> CopyJob[Copier]:
    parts = numbers(0, 1, 2)
    way = PartMover(line, line.confirm, max_bytes=10)
    return CopyJob(Spans(parts, parts, numbers(10, 10, 10)), 60.0, way, frozenset())


def test_next_part_starts_before_the_previous_one_finishes() -> None:
    line = Line()
    job_of(line).run(NullCopier())
    moved = ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]
    assert line.events == [*moved, "confirm 3"]


def test_parts_in_flight_are_drained_when_one_fails() -> None:
    line = Line(fails_at=0)
    with pytest.raises(TransferError, match="lost"):
        job_of(line).run(NullCopier())
    assert line.events == ["begin 0", "begin 1", "drain 1"]


def test_stopped_transfer_is_drained() -> None:
    line = Line()
    job = job_of(line)
    assert job.mark_started()
    line.stop = job.stop
    with pytest.raises(TransferCancelled):
        job.run(NullCopier())
    assert line.events == ["begin 0", "drain 0"]


def test_queued_job_behind_a_hung_one_can_be_cancelled() -> None:
    line, released, is_held = Line(), threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert released.wait(10)

    line.stop = hold
    worker: CopyWorker[Copier] = CopyWorker(NullCopier)
    running, queued = job_of(line), job_of(line)
    try:
        worker.submit(running)
        worker.submit(queued)
        assert is_held.wait(10)
        queued.transfer.cancel()
        assert queued.transfer.poll() is TransferState.FAILED
        assert running.transfer.poll() is TransferState.PENDING
    finally:
        line.stop = lambda: None
        released.set()
        worker.close()
    running.transfer.wait()
    assert line.events.count("begin 0") == 1, "the cancelled job was never started"


class Drained(NullCopier):
    def __init__(self, line: Line) -> None:
        self._line = line

    def drain(self) -> None:
        self._line.events.append("all drained")


def test_copy_error_fails_only_its_transfer(caplog: pytest.LogCaptureFixture) -> None:
    """Such as an out-of-memory error of the device, for which torch has its own exception."""
    line, shortages = Line(), [RuntimeError("CUDA out of memory")]

    def run_short() -> None:
        if shortages:
            raise shortages.pop()

    line.stop = run_short
    worker: CopyWorker[Copier] = CopyWorker(lambda: Drained(line))
    try:
        for error in ("CUDA out of memory", None):
            job = job_of(line)
            worker.submit(job)
            if error is None:
                job.transfer.wait()
            else:
                with pytest.raises(TransferError, match=error):
                    job.transfer.wait()
                assert line.events == ["begin 0", "all drained"]
    finally:
        worker.close()
    assert "copying failed" in caplog.text


class Unwilling(NullCopier):
    def close(self) -> None:
        raise RuntimeError("the device is gone")


def test_copier_that_fails_to_close_ends_its_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    CopyWorker(Unwilling).close()
    assert "a copier can't be closed" in caplog.text


def test_transfers_fail_if_no_copier_can_be_created(caplog: pytest.LogCaptureFixture) -> None:
    is_tried = threading.Event()

    def fail() -> Copier:
        assert is_tried.wait(10)
        raise RuntimeError("no stream")

    worker: CopyWorker[Copier] = CopyWorker(fail)
    early, late = job_of(Line()), job_of(Line())
    worker.submit(early)
    is_tried.set()
    with pytest.raises(TransferError, match="no copier could be created: RuntimeError"):
        early.transfer.wait()
    with pytest.raises(TransferError, match="no copier could be created"):
        worker.submit(late)
    worker.close()
