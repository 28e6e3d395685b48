"""Leases: each ends once, and repeated requests get the same reply."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_kv.leases import MAX_ENDINGS, LeaseTable
from mooncake_kv.protocol import LeaseStatus

DURATION_S = 10.0


def test_lease_ends_at_its_deadline_and_not_before() -> None:
    leases = LeaseTable(DURATION_S)
    leases.grant("a", now=0.0)
    assert leases.expire(now=9.9) == []
    assert leases.is_held("a")
    assert leases.expire(now=10.0) == ["a"]
    assert leases.end("a", LeaseStatus.RELEASED) is LeaseStatus.EXPIRED


def test_renewal_extends_the_deadline_and_returns_lost_leases() -> None:
    leases = LeaseTable(DURATION_S)
    leases.grant("a", now=0.0)
    leases.grant("b", now=1.0)
    assert leases.renew(["a", "unknown"], now=9.0) == ("unknown",)
    assert leases.expire(now=15.0) == ["b"]
    assert leases.renew(["a", "b"], now=15.0) == ("b",)
    assert leases.expire(now=24.9) == []


def test_end_of_lease_is_remembered_for_repeated_requests() -> None:
    leases = LeaseTable(DURATION_S)
    leases.grant("a", now=0.0)
    assert leases.end("a", LeaseStatus.RELEASED) is LeaseStatus.RELEASED
    assert leases.end("a", LeaseStatus.EXPIRED) is LeaseStatus.RELEASED
    assert leases.end("b", LeaseStatus.RELEASED) is LeaseStatus.UNKNOWN


def test_released_lease_is_void_for_a_second_reader() -> None:
    leases = LeaseTable(DURATION_S)
    leases.grant("a", now=0.0)
    assert leases.end("a", LeaseStatus.RELEASED, "first") is LeaseStatus.RELEASED
    assert leases.end("a", LeaseStatus.RELEASED, "second") is LeaseStatus.EXPIRED
    assert leases.end("a", LeaseStatus.RELEASED, "first") is LeaseStatus.RELEASED


def test_ended_leases_are_eventually_forgotten() -> None:
    leases = LeaseTable(DURATION_S)
    for index in range(MAX_ENDINGS + 1):
        leases.grant(str(index), now=0.0)
        leases.end(str(index), LeaseStatus.RELEASED)
    assert leases.end("0", LeaseStatus.RELEASED) is LeaseStatus.UNKNOWN
    assert leases.end("1", LeaseStatus.EXPIRED) is LeaseStatus.RELEASED


NAMES = st.sampled_from("abcdef")
ENDINGS = st.sampled_from([LeaseStatus.RELEASED, LeaseStatus.EXPIRED])


class Leases(RuleBasedStateMachine):
    """State machine against two plain dictionaries; a name is used once, as the engine's ids
    are."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = LeaseTable(DURATION_S)
        self.now = 0.0
        self.deadlines: dict[str, float] = {}
        self.endings: dict[str, LeaseStatus] = {}

    @rule(name=NAMES)
    def grant(self, name: str) -> None:
        if name not in self.deadlines and name not in self.endings:
            self.leases.grant(name, self.now)
            self.deadlines[name] = self.now + DURATION_S

    @rule(names=st.lists(NAMES))
    def renew(self, names: list[str]) -> None:
        lost = self.leases.renew(names, self.now)
        assert lost == tuple(name for name in names if name not in self.deadlines)
        for name in set(names) & set(self.deadlines):
            self.deadlines[name] = self.now + DURATION_S

    @rule(name=NAMES, ending=ENDINGS)
    def end(self, name: str, ending: LeaseStatus) -> None:
        if self.deadlines.pop(name, None) is not None:
            self.endings[name] = ending
        wanted = self.endings.get(name, LeaseStatus.UNKNOWN)
        assert self.leases.end(name, ending) is wanted

    @rule(seconds=st.floats(0.0, 2 * DURATION_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        gone = {name for name, deadline in self.deadlines.items() if deadline <= self.now}
        assert set(self.leases.expire(self.now)) == gone
        for name in gone:
            del self.deadlines[name]
            self.endings[name] = LeaseStatus.EXPIRED

    @invariant()
    def same_leases(self) -> None:
        assert len(self.leases) == len(self.deadlines)
        assert all(self.leases.is_held(name) for name in self.deadlines)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40)
