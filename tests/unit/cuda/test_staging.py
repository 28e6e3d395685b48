"""How transfers are cut into parts, packed, and joined."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_hal.errors import TransferError
from mooncake_hal_cuda.copying import worker
from mooncake_hal_cuda.copying.worker import parts_of
from mooncake_hal_cuda.staged.messages import STAGING_BYTES, Gather, packed, pieces_of
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
        (numbers(1), numbers(STAGING_BYTES + 1), "must have 1 to"),
        (numbers(1, 2), numbers(2**63, 2**63), "must have 1 to"),
    ],
)
def test_a_call_with_other_pieces_is_refused(
    addresses: np.ndarray, nbytes: np.ndarray, words: str
) -> None:
    with pytest.raises(TransferError, match=words):
        pieces_of(Gather(addresses.tobytes(), nbytes.tobytes()))
