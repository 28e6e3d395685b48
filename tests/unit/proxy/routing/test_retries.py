"""The retry budget, and the quarantine of request bodies after which instances die."""

from __future__ import annotations

from hypothesis import given, strategies as st

from mooncake_proxy.routing.retries import (
    MAX_SUSPECTS,
    QUARANTINE_S,
    RetryBudget,
    SuspectBodies,
)


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1), st.integers(0, 20))
def test_retries_stay_within_reserve_and_ratio(
    steps: list[bool], ratio: float, reserve: int
) -> None:
    budget = RetryBudget(ratio, reserve)
    taken = deposited = 0
    for is_retry in steps:
        if is_retry:
            taken += budget.take()
        else:
            budget.deposit()
            deposited += 1
    assert taken <= reserve + ratio * deposited + 1e-6


def test_two_losses_of_one_body_within_a_minute_quarantine_it() -> None:
    suspects = SuspectBodies()
    assert suspects.note_loss(b"body", "p0", began=0.0, now=1.0) == 1
    assert suspects.note_loss(b"body", "p0", began=0.5, now=1.0) == 1, "one death, two requests"
    assert suspects.quarantine_left(b"body", now=1.0) == 0.0
    assert suspects.note_loss(b"body", "p0", began=1.5, now=2.0) == 2
    assert suspects.quarantine_left(b"body", now=3.0) == QUARANTINE_S - 1.0
    assert suspects.quarantine_left(b"other", now=3.0) == 0.0
    assert suspects.quarantine_left(b"body", now=2.0 + QUARANTINE_S) == 0.0


def test_answered_body_is_not_suspected() -> None:
    suspects = SuspectBodies()
    suspects.note_loss(b"body", "p0", began=0.0, now=1.0)
    suspects.clear(b"body")
    assert suspects.note_loss(b"body", "p1", began=1.0, now=2.0) == 1


def test_number_of_suspects_is_bounded() -> None:
    suspects = SuspectBodies()
    for number in range(3 * MAX_SUSPECTS):
        suspects.note_loss(b"%d" % number, "p0", began=0.0, now=1.0)
    assert len(suspects.by_hash) == MAX_SUSPECTS
