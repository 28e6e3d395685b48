"""Which connections are evicted when too many are in their handshake, and their deadlines."""

from __future__ import annotations

from mooncake_hal.session.strangers import Limits, Strangers

LIMITS = Limits(strangers=3, handshake_s=10.0)


def test_oldest_stranger_is_evicted() -> None:
    strangers: Strangers[int] = Strangers(LIMITS)
    gone = [strangers.enter(number, "a", 0.0) for number in range(5)]
    assert gone == [None, None, None, 0, 1]
    assert strangers.all() == [2, 3, 4]


def test_flooding_host_evicts_its_own_connections() -> None:
    strangers: Strangers[int] = Strangers(LIMITS)
    strangers.enter(0, "friend", 0.0)
    gone = [strangers.enter(number, "flood", 0.0) for number in range(1, 6)]
    assert gone == [None, None, 1, 2, 3]
    assert 0 in strangers.all()


def test_stranger_that_left_is_not_counted() -> None:
    strangers: Strangers[int] = Strangers(LIMITS)
    for number in range(3):
        strangers.enter(number, "a", 0.0)
    assert strangers.leave(1)
    assert not strangers.leave(1)
    assert strangers.enter(3, "a", 0.0) is None


def test_each_stranger_has_one_deadline() -> None:
    strangers: Strangers[int] = Strangers(LIMITS)
    assert strangers.next_deadline() is None
    strangers.enter(0, "a", 1.0)
    strangers.enter(1, "a", 5.0)
    assert strangers.next_deadline() == 11.0
    assert strangers.expire(10.9) == []
    assert strangers.expire(11.0) == [0]
    assert strangers.next_deadline() == 15.0
