"""Stop signals of programs, and the restart policy of child processes."""

from __future__ import annotations

import pytest

from mooncake_engine.process.child_processes import RestartPolicy, StopSignals


def test_simultaneous_signals_are_one_stop_request() -> None:
    """Ctrl-C in a terminal reaches a program directly and again from its parent."""
    signals = StopSignals()
    assert signals.requested_at is None
    assert [signals.note(now) for now in (10.0, 10.01, 10.9)] == [True, False, False]
    assert not signals.is_forced
    assert signals.requested_at == 10.0


def test_later_signal_forces_the_stop() -> None:
    signals = StopSignals()
    signals.note(10.0)
    assert not signals.note(11.5)
    assert signals.is_forced
    assert signals.requested_at == 10.0


def test_restart_delay_doubles_with_each_failure() -> None:
    restarts = RestartPolicy(7)
    delays = [restarts.next_delay_s(0.5) for _ in range(8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


def test_long_run_resets_the_restart_count() -> None:
    restarts = RestartPolicy(2)
    assert [restarts.next_delay_s(ran_s) for ran_s in (5.0, 5.0)] == [1.0, 2.0]
    assert [restarts.next_delay_s(ran_s) for ran_s in (61.0, 0.0, 0.0)] == [1.0, 2.0, None]


@pytest.mark.parametrize("ran_s", [0.0, 1e6])
def test_zero_restarts_never_restart(ran_s: float) -> None:
    assert RestartPolicy(0).next_delay_s(ran_s) is None


def test_unlimited_restarts_have_a_delay_of_at_most_30_seconds() -> None:
    restarts = RestartPolicy(None)
    delays = [restarts.next_delay_s(0.5) for _ in range(5000)]
    assert delays[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert set(delays[5:]) == {30.0}
    assert str(restarts) == "restart 5000"
