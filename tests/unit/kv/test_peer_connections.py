"""Which connection to a peer an order uses, and when it is closed."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import PeerLost, TransferCancelled
from mooncake_kv.peer_connections import LOADING, SAVING, PeerConnections


class Connections:
    """The connections of a rank, and those that were closed."""

    def __init__(self) -> None:
        self.closed: list[tuple[str, int]] = []
        self.all = PeerConnections(lambda epoch, number: self.closed.append((epoch, number)))

    def number(self, epoch: str = "a", use: str = LOADING) -> int:
        """The number of the connection that an order gets now."""
        with self.all.used([epoch], use) as numbers:
            return numbers[epoch]

    def fail(self, error: Exception) -> None:
        """An order that uses both peers."""
        with self.all.used(["a", "b"], LOADING):
            raise error


@pytest.fixture
def connections() -> Connections:
    return Connections()


def test_each_peer_has_separate_connections_for_loads_and_saves(connections: Connections) -> None:
    uses = [("a", LOADING), ("a", SAVING), ("b", LOADING), ("b", SAVING)]
    numbers = [connections.number(*use) for use in uses]
    assert len(set(numbers)) == 4
    assert [connections.number(*use) for use in uses] == numbers
    assert connections.closed == []


def test_cancellation_and_unrelated_failure_keep_connections(
    connections: Connections,
) -> None:
    number = connections.number()
    for error in (TransferCancelled("late"), ValueError("a plan")):
        with pytest.raises(type(error)):
            connections.fail(error)
    assert (connections.number(), connections.closed) == (number, [])


def test_last_user_of_failed_connection_closes_it(connections: Connections) -> None:
    with (
        connections.all.used(["a"], LOADING) as first,
        connections.all.used(["a"], LOADING) as second,
    ):
        assert first == second
        for _ in range(2):
            with pytest.raises(PeerLost):
                connections.fail(PeerLost("gone"))
        assert ("a", first["a"]) not in connections.closed
        assert connections.number() != first["a"]
    assert connections.closed.count(("a", first["a"])) == 1
    assert ("a", connections.number()) not in connections.closed


def test_connections_of_a_forgotten_peer_are_not_reused(connections: Connections) -> None:
    with connections.all.used(["a"], SAVING) as saving:
        other, number = connections.number("b"), connections.number()
        connections.all.forget("a")
        assert (connections.number("b"), connections.closed) == (other, [])
    assert connections.closed == [("a", saving["a"])]
    assert connections.number() > number
