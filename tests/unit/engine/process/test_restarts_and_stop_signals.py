"""When programs end, and when they are started again."""

from __future__ import annotations

import pytest

from mooncake_engine.process.child_processes import RestartPolicy, StopSignals


def test_signals_at_once_are_one_stop() -> None:
    """A terminal's Ctrl-C reaches a program, and its parent passes it on."""
    signals = StopSignals()
    assert signals.requested_at is None
    assert [signals.note(now) for now in (10.0, 10.01, 10.9)] == [True, False, False]
    assert not signals.is_forced
    assert signals.requested_at == 10.0


def test_a_later_signal_wants_the_end_at_once() -> None:
    signals = StopSignals()
    signals.note(10.0)
    assert not signals.note(11.5)
    assert signals.is_forced
    assert signals.requested_at == 10.0


def test_who_keeps_dying_waits_longer_each_time() -> None:
    restarts = RestartPolicy(7)
    delays = [restarts.next_delay_s(0.5) for _ in range(8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


def test_who_ran_well_gets_all_chances_again() -> None:
    restarts = RestartPolicy(2)
    assert [restarts.next_delay_s(ran_s) for ran_s in (5.0, 5.0)] == [1.0, 2.0]
    assert [restarts.next_delay_s(ran_s) for ran_s in (61.0, 0.0, 0.0)] == [1.0, 2.0, None]


@pytest.mark.parametrize("ran_s", [0.0, 1e6])
def test_no_chances_are_none(ran_s: float) -> None:
    assert RestartPolicy(0).next_delay_s(ran_s) is None


def test_who_has_any_number_of_chances_never_waits_longer_than_half_a_minute() -> None:
    restarts = RestartPolicy(None)
    delays = [restarts.next_delay_s(0.5) for _ in range(5000)]
    assert delays[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert set(delays[5:]) == {30.0}
    assert str(restarts) == "restart 5000"
