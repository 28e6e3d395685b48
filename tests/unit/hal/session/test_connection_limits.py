"""Which connections are evicted when too many are in their handshake, and their deadlines."""

from __future__ import annotations

from mooncake_hal.session.connection_limits import Limits, PendingHandshakes

LIMITS = Limits(handshakes=3, handshake_s=10.0)


def test_oldest_handshake_is_evicted() -> None:
    handshakes: PendingHandshakes[int] = PendingHandshakes(LIMITS)
    gone = [handshakes.enter(number, "a", 0.0) for number in range(5)]
    assert gone == [None, None, None, 0, 1]
    assert handshakes.all() == [2, 3, 4]


def test_flooding_host_evicts_its_own_connections() -> None:
    handshakes: PendingHandshakes[int] = PendingHandshakes(LIMITS)
    handshakes.enter(0, "friend", 0.0)
    gone = [handshakes.enter(number, "flood", 0.0) for number in range(1, 6)]
    assert gone == [None, None, 1, 2, 3]
    assert 0 in handshakes.all()


def test_ended_handshake_is_not_counted() -> None:
    handshakes: PendingHandshakes[int] = PendingHandshakes(LIMITS)
    for number in range(3):
        handshakes.enter(number, "a", 0.0)
    assert handshakes.leave(1)
    assert not handshakes.leave(1)
    assert handshakes.enter(3, "a", 0.0) is None


def test_each_handshake_has_one_deadline() -> None:
    handshakes: PendingHandshakes[int] = PendingHandshakes(LIMITS)
    assert handshakes.next_deadline() is None
    handshakes.enter(0, "a", 1.0)
    handshakes.enter(1, "a", 5.0)
    assert handshakes.next_deadline() == 11.0
    assert handshakes.expire(10.9) == []
    assert handshakes.expire(11.0) == [0]
    assert handshakes.next_deadline() == 15.0
