"""Reservations: one writer each, and never freed while it may write."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_kv.leases import ReservationState, ReservationTable
from mooncake_kv.protocol import LeaseStatus, Writer

ONE = Writer("p-1", "a", "127.0.0.1", 1)
TWO = Writer("p-2", "b", "127.0.0.1", 2)
SAME_INSTANCE = Writer("p-1", "other", "127.0.0.1", 1)


@pytest.fixture
def table() -> ReservationTable:
    return ReservationTable(open_s=30.0, silence_s=3.0)


def test_only_the_first_writer_is_granted(table: ReservationTable) -> None:
    table.reserve("r", (0, 10), now=0.0)
    assert table.open("r", ONE, 1.0) is LeaseStatus.HELD
    assert table.open("r", ONE, 1.5) is LeaseStatus.HELD
    assert table.open("r", TWO, 2.0) is LeaseStatus.EXPIRED
    assert table.open("r", SAME_INSTANCE, 2.0) is LeaseStatus.EXPIRED


def test_early_and_late_writers_are_rejected(table: ReservationTable) -> None:
    assert table.open("r", ONE, 0.0) is LeaseStatus.UNKNOWN
    table.reserve("r", (0, 10), now=0.0)
    assert table.revoke("r", 1.0)
    assert table.open("r", ONE, 2.0) is LeaseStatus.EXPIRED
    assert len(table) == 0


def test_granted_reservation_is_kept_until_its_writer_reports_completion(
    table: ReservationTable,
) -> None:
    table.reserve("r", (0, 10), now=0.0)
    table.open("r", ONE, 1.0)
    assert not table.revoke("r", 2.0)
    assert table.renew(["r"], 3.0) == ("r",)
    assert table.open("r", ONE, 3.5) is LeaseStatus.EXPIRED
    assert not table.end("r", TWO, LeaseStatus.EXPIRED)
    assert len(table) == 1
    assert table.end("r", ONE, LeaseStatus.EXPIRED)
    assert len(table) == 0


def test_repeated_requests_get_same_result(table: ReservationTable) -> None:
    table.reserve("r", (0, 10), now=0.0)
    table.open("r", ONE, 1.0)
    assert table.end("r", ONE, LeaseStatus.RELEASED)
    assert not table.end("r", ONE, LeaseStatus.RELEASED)
    assert table.ending("r", ONE) is LeaseStatus.RELEASED
    assert table.ending("r", TWO) is LeaseStatus.EXPIRED
    assert table.ending("never", ONE) is LeaseStatus.UNKNOWN


def test_keepalives_extend_the_deadline(table: ReservationTable) -> None:
    table.reserve("r", (0, 10), now=0.0)
    assert [held.request_id for held in table.overdue(30.0)] == ["r"]
    table.open("r", ONE, 31.0)
    assert table.renew(["r", "x"], 33.0) == ("x",)
    assert table.overdue(35.9) == []
    [late] = table.overdue(36.0)
    assert late.last_contact == 33.0
    assert table.overdue(36.1) == []


class ReservationMachine(RuleBasedStateMachine):
    """Any message from any writer: only the granted writer ends the reservation."""

    names = st.sampled_from(["r1", "r2"])
    writers = st.sampled_from([ONE, TWO, SAME_INSTANCE])

    def __init__(self) -> None:
        super().__init__()
        self.table = ReservationTable(open_s=5.0, silence_s=2.0)
        self.now = 0.0
        self.granted: dict[str, Writer] = {}
        self.revoked: set[str] = set()
        self.used: set[str] = set()

    @rule(name=names)
    def reserve(self, name: str) -> None:
        if name not in self.used:
            self.used.add(name)
            self.table.reserve(name, (0, 1), self.now)

    @rule(name=names, writer=writers)
    def open(self, name: str, writer: Writer) -> None:
        was_held = self.table.get(name) is not None
        if self.table.open(name, writer, self.now) is LeaseStatus.HELD:
            assert was_held
            assert name not in self.revoked
            assert self.granted.setdefault(name, writer) == writer

    @rule(name=names)
    def revoke(self, name: str) -> None:
        if self.table.revoke(name, self.now):
            assert name not in self.granted, "freed while a writer may write"
        elif self.table.get(name) is not None:
            self.revoked.add(name)

    @rule(name=names, writer=writers)
    def end(self, name: str, writer: Writer) -> None:
        held = self.table.get(name)
        if self.table.end(name, writer, LeaseStatus.EXPIRED):
            assert held is not None
            assert self.granted.get(name, writer) == writer

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for held in self.table.overdue(self.now):
            assert held.deadline > self.now

    @precondition(lambda self: self.used)
    @rule()
    def renew(self) -> None:
        lost = self.table.renew(sorted(self.used), self.now)
        for name in self.used - set(lost):
            assert name in self.granted
            assert name not in self.revoked

    @invariant()
    def writer_is_known_once_granted(self) -> None:
        for name in ("r1", "r2"):
            held = self.table.get(name)
            if held is not None:
                assert (held.state is ReservationState.OFFERED) == (held.writer is None)


ReservationMachine.TestCase.settings = settings(max_examples=150)
TestReservationMachine = ReservationMachine.TestCase
