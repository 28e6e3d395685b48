"""How transfers are cut into parts, packed, and joined."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mooncake_hal.errors import TransferCancelled, TransferError
from mooncake_hal.transport import Spans
from mooncake_hal_cuda.copying import worker
from mooncake_hal_cuda.copying.copier import Copies, HostCopier
from mooncake_hal_cuda.copying.worker import Job, Underway, Way, parts_of
from mooncake_hal_cuda.staged.messages import SLOT_BYTES, Gather, packed, pieces_of
from mooncake_hal_cuda.staged.peer import joined


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
def test_parts_are_as_full_as_may_be(nbytes: tuple[int, ...], parts: list[tuple[int, int]]) -> None:
    assert parts_of(numbers(*nbytes), 10) == parts


def test_parts_have_a_limit_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PART_PIECES", 2)
    assert parts_of(numbers(1, 1, 1), 10) == [(0, 2), (2, 3)]


def test_packed_pieces_lie_one_after_the_other() -> None:
    assert packed(100, numbers(3, 5, 2)).tolist() == [100, 103, 108]


def test_what_is_packed_on_both_sides_is_one_span() -> None:
    nbytes = numbers(3, 5, 2)
    whole = joined(packed(100, nbytes), packed(900, nbytes), nbytes)
    assert (len(whole), whole.total_bytes) == (1, 10)
    apart = joined(packed(100, nbytes), numbers(900, 950, 990), nbytes)
    assert apart.remote.tolist() == [900, 950, 990]


@pytest.mark.parametrize(
    ("addresses", "nbytes", "words"),
    [
        (numbers(1, 2), numbers(3), "different or odd sizes"),
        (numbers(), numbers(), "different or odd sizes"),
        (numbers(1), numbers(0), "must have 1 to"),
        (numbers(1), numbers(SLOT_BYTES + 1), "must have 1 to"),
        (numbers(1, 2), numbers(2**63, 2**63), "must have 1 to"),
    ],
)
def test_a_call_with_other_pieces_is_refused(
    addresses: np.ndarray, nbytes: np.ndarray, words: str
) -> None:
    with pytest.raises(TransferError, match=words):
        pieces_of(Gather(addresses.tobytes(), nbytes.tobytes(), 0))


def test_a_slot_that_is_not_there_is_refused() -> None:
    one = numbers(1).tobytes()
    with pytest.raises(TransferError, match="there are 2 slots, slot 2 was asked for"):
        pieces_of(Gather(one, one, 2))


class Line:
    """Notes what happens to parts; the part that begins at ``fails_at`` does not arrive."""

    def __init__(self, fails_at: int = -1) -> None:
        self.told: list[str] = []
        self.stop: Callable[[], None] = lambda: None
        self._fails_at = fails_at

    def __call__(self, part: Spans, deadline: float, copier: Copies) -> Underway:
        name = int(part.local[0])
        self.told.append(f"begin {name}")
        self.stop()

        def finish() -> None:
            if name == self._fails_at:
                raise TransferError("lost")
            self.told.append(f"finish {name}")

        return Underway(finish, lambda: self.told.append(f"drain {name}"))

    def confirm(self, spans: Spans, deadline: float) -> None:
        self.told.append(f"confirm {len(spans)}")


def job_of(line: Line) -> Job:
    parts = numbers(0, 1, 2)
    way = Way(line, line.confirm, most_bytes=10)
    return Job(Spans(parts, parts, numbers(10, 10, 10)), 60.0, way, frozenset())


def test_a_part_begins_before_the_one_before_it_is_finished() -> None:
    line = Line()
    job_of(line).run(HostCopier())
    moved = ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]
    assert line.told == [*moved, "confirm 3"]


def test_what_is_underway_when_a_part_is_lost_is_drained() -> None:
    line = Line(fails_at=0)
    with pytest.raises(TransferError, match="lost"):
        job_of(line).run(HostCopier())
    assert line.told == ["begin 0", "begin 1", "drain 1"]


def test_a_stopped_transfer_is_drained() -> None:
    line = Line()
    job = job_of(line)
    line.stop = job.is_stopped.set
    with pytest.raises(TransferCancelled):
        job.run(HostCopier())
    assert line.told == ["begin 0", "drain 0"]
