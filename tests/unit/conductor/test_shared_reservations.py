"""Conductors that exchange their reservations see the same loads, and leak none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from support.conductor_fleets import NAMES, Member, ask

from mooncake_conductor.shared_reservations import Moved, ReservationChange, Reserved


def connect(first: Member, second: Member, clock: list[float]) -> None:
    """Deliver each member's changes to the other at once, in the wire format."""
    encode = msgspec.json.Encoder().encode
    decode = msgspec.json.Decoder(ReservationChange).decode
    for one, other in ((first, second), (second, first)):

        def publish(change, one=one, other=other) -> None:
            other.exchange.apply(one.owner, [decode(encode(change))], clock[0])

        one.exchange.start(publish)


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 20), st.integers(1, 6)),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=80)
def test_both_members_see_the_same_loads(steps: list[tuple[int, int, int, int]]) -> None:
    clock = [0.0]
    members = [Member("a", NAMES), Member("b", NAMES[::-1])]
    connect(*members, clock)
    live: dict[str, Member] = {}
    joined: set[str] = set()
    for number, (which, act, chosen, length) in enumerate(steps):
        clock[0] += 0.05
        now = clock[0]
        if act == 0 or not live:
            name, member = f"r{number}", members[which]
            member.conductor.route(ask(name, length, first=100 * number, owner=member.owner), now)
            live[name] = member
        else:
            name = sorted(live)[chosen % len(live)]
            conductor = live[name].conductor
            if act == 1 and name not in joined:
                conductor.prefilled(name, now)
            elif act <= 2:
                conductor.joined(name, now)
                joined.add(name)
            else:
                (conductor.finished if act == 3 else conductor.ended)(name, now)
                del live[name]
        assert members[0].loads(now) == members[1].loads(now)
    for name, member in live.items():
        member.conductor.ended(name, clock[0])
    for member in members:
        assert (len(member.conductor.book), len(member.conductor.ledger)) == (0, 0)
        assert not member.conductor.index._predictions._masks


def test_two_members_spread_concurrent_requests() -> None:
    clock = [0.0]
    first, second = Member("a", NAMES), Member("b", NAMES)
    connect(first, second, clock)
    chosen = [
        member.conductor.route(
            ask(f"{member.owner}{number}", 8, 100 * number, owner=member.owner), 0.0
        )
        for number in range(3)
        for member in (first, second)
    ]
    names = [first.conductor.fleet.names[each.prefill.slot] for each in chosen]
    assert sorted(names) == ["p0", "p0", "p1", "p1", "p2", "p2"]


def test_prefix_computed_for_another_member_is_predicted() -> None:
    first, second = Member("a", NAMES), Member("b", NAMES[::-1])
    connect(first, second, [0.0])
    made = first.conductor.route(ask("x", 30, owner="a"), 0.0)
    match = second.conductor.index.match(ask("y", 30).keys, 0.0)
    home = second.slots[first.conductor.fleet.names[made.prefill.slot]]
    assert match.predicted[home] == 30


@pytest.mark.parametrize("end", ["ended", "expired"])
def test_reservation_that_ends_during_the_prefill_is_not_published_as_prefilled(end: str) -> None:
    """The other conductors would take its chunks for held by the prefill instance."""
    member, published = Member("a", NAMES), list[ReservationChange]()
    member.exchange.start(published.append)
    member.conductor.route(ask("x", 3, owner="a"), 0.0)
    if end == "ended":
        member.conductor.ended("x", 1.0)
    else:
        member.conductor.book.sweep(1e6)
    events = [change.event.value for change in published if isinstance(change, Moved)]
    assert events == ["ended"]
    assert not member.conductor.index._predictions._masks
    assert not member.conductor.fleet.queues.num_requests.any()


def test_reservations_of_a_departed_owner_are_released() -> None:
    first, second = Member("a", NAMES), Member("b", NAMES)
    connect(first, second, [0.0])
    first.conductor.route(ask("x", 3, owner="a"), 0.0)
    second.conductor.route(ask("y", 3, owner="b"), 0.0)
    assert len(second.conductor.book) == 2
    second.conductor.book.release_owner("a", 1.0)
    assert len(second.conductor.book) == 1
    assert len(first.conductor.book) == 2, "only the owner publishes its reservations"


@pytest.mark.parametrize(
    "change",
    [
        Reserved("x", "nobody", "d0", 10, 0, 1.0, "default", b"", 1.0, 0.0, 0.0, 1.0, 60.0),
        Reserved("x", "p0", "d0", 10, 0, 1.0, "default", b"odd", 1.0, 0.0, 0.0, 1.0, 60.0),
        Moved("never heard of", "finished"),  # type: ignore[arg-type]  # its value
    ],
)
def test_change_with_unknown_names_is_ignored(change: ReservationChange) -> None:
    member = Member("b", NAMES)
    member.exchange.apply("a", [change], 0.0)
    assert len(member.conductor.book) == 0
    assert len(member.conductor.ledger) == 0


def test_reservation_without_updates_expires_at_its_deadline() -> None:
    first, second = Member("a", NAMES), Member("b", NAMES)
    connect(first, second, [100.0])
    first.conductor.route(ask("x", 3, owner="a"), 7.0)
    made = second.conductor.book.get("x")
    assert made is not None
    assert made.deadline == 100.0 + (600.0 - 7.0)
    second.conductor.book.sweep(1000.0)
    assert len(second.conductor.book) == 0


@pytest.mark.parametrize(("num_requests", "num_keys"), [(200, 6), (60, 800), (30, 4096)])
def test_snapshot_portions_are_bounded_for_any_prompt_length(
    num_requests: int, num_keys: int
) -> None:
    """A portion is sent at once through a socket that queues ten messages for its reader."""
    member = Member("a", NAMES)
    for number in range(num_requests):
        asked = ask(f"r{number}", num_keys, first=10_000 * number, owner="a")
        member.conductor.route(asked, 0.0)
        member.conductor.joined(f"r{number}", 0.0)
    portions = list(member.exchange.portions(lambda: 0.0))
    assert max(len(msgspec.json.encode(portion)) for portion in portions) < 150_000
    published = [change for portion in portions for change in portion]
    assert [change.request_id for change in published if isinstance(change, Reserved)] == [
        f"r{number}" for number in range(num_requests)
    ]
    assert published == member.exchange.snapshot(0.0)
