"""Which connection to a store an order uses, and who closes it."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import PeerLost, TransferCancelled
from mooncake_kv.pool.store_lanes import LOADING, SAVING, StoreLanes


class Lanes:
    """Those of a rank, and what was closed of them."""

    def __init__(self) -> None:
        self.closed: list[tuple[str, int]] = []
        self.lanes = StoreLanes(lambda epoch, number: self.closed.append((epoch, number)))

    def number(self, epoch: str = "a", use: str = LOADING) -> int:
        """Of the connection that an order gets now."""
        with self.lanes.used([epoch], use) as numbers:
            return numbers[epoch]

    def fail(self, error: Exception) -> None:
        """An order over both stores."""
        with self.lanes.used(["a", "b"], LOADING):
            raise error


@pytest.fixture
def lanes() -> Lanes:
    return Lanes()


def test_each_store_has_one_for_loads_and_one_for_saves(lanes: Lanes) -> None:
    uses = [("a", LOADING), ("a", SAVING), ("b", LOADING), ("b", SAVING)]
    numbers = [lanes.number(*use) for use in uses]
    assert len(set(numbers)) == 4
    assert [lanes.number(*use) for use in uses] == numbers
    assert lanes.closed == []


def test_what_was_cancelled_or_went_wrong_elsewhere_leaves_them_as_they_are(lanes: Lanes) -> None:
    number = lanes.number()
    for error in (TransferCancelled("late"), ValueError("a plan")):
        with pytest.raises(type(error)):
            lanes.fail(error)
    assert (lanes.number(), lanes.closed) == (number, [])


def test_the_last_that_uses_one_which_failed_closes_it(lanes: Lanes) -> None:
    with lanes.lanes.used(["a"], LOADING) as first, lanes.lanes.used(["a"], LOADING) as second:
        assert first == second
        for _ in range(2):
            with pytest.raises(PeerLost):
                lanes.fail(PeerLost("gone"))
        assert ("a", first["a"]) not in lanes.closed
        assert lanes.number() != first["a"]
    assert lanes.closed.count(("a", first["a"])) == 1
    assert ("a", lanes.number()) not in lanes.closed


def test_those_of_a_store_that_is_gone_are_given_to_nobody(lanes: Lanes) -> None:
    with lanes.lanes.used(["a"], SAVING) as saving:
        other, number = lanes.number("b"), lanes.number()
        lanes.lanes.forget("a")
        assert (lanes.number("b"), lanes.closed) == (other, [])
    assert lanes.closed == [("a", saving["a"])]
    assert lanes.number() > number
