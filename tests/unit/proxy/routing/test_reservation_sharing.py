"""Randomly lost reservation reports cause no phantom load, and hide no load for longer than one
snapshot period."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from support.conductor_fleets import NAMES, Member, ask

from mooncake_conductor.shared_reservations import PORTION, ReservationChange
from mooncake_proxy.routing.conductor_fleet import OWNER
from mooncake_proxy.routing.reservation_sharing import ReservationSharing


class OneConductor:
    """The interface that reservation sharing uses of a model's conductors."""

    def __init__(self, member: Member, clock: list[float]) -> None:
        self.member, self.clock = member, clock

    def share(self, publish: Callable[[bool, ReservationChange], None]) -> None:
        self.member.exchange.start(partial(publish, False))

    def portions(self) -> Iterator[tuple[bool, list[ReservationChange]]]:
        for changes in self.member.exchange.portions(lambda: self.clock[0]):
            yield False, changes

    def apply(
        self, owner: str, _: bool, changes: list[ReservationChange], *, is_snapshot: bool
    ) -> None:
        self.member.exchange.apply(owner, changes, self.clock[0], is_snapshot=is_snapshot)

    def retain(self, owner: str, request_ids: Collection[str]) -> None:
        self.member.exchange.retain(owner, request_ids, self.clock[0])


class Routers(list[SimpleNamespace]):
    """The routers of one model."""

    def on_router(self, listen: Callable[[SimpleNamespace], None]) -> None:
        for router in self:
            listen(router)


class TwoWorkers:
    """One worker sends its reservations, of which some messages are lost."""

    def __init__(self, loss: float, seed: int) -> None:
        self.clock, self.rng, self.loss = [0.0], random.Random(seed), loss
        self.reporter, self.receiver = Member(OWNER, NAMES), Member("b", NAMES[::-1])
        self.loop = asyncio.new_event_loop()
        self.sending, self.receiving = (
            ReservationSharing(
                Routers([SimpleNamespace(model="", conductor=OneConductor(each, self.clock))]),
                self.loop,
            )
            for each in (self.reporter, self.receiver)
        )
        self.reports = self.sending.report_to(self._send)
        self.live: dict[str, int] = {}

    def _send(self, owner: str, report: bytes) -> None:
        assert owner == OWNER
        if self.rng.random() >= self.loss:
            self.receiving.receive(msgspec.Raw(report))

    def step(self, number: int) -> None:
        """Start a request, or advance or finish one, on any instance."""
        self.clock[0] += 0.05
        now, conductor = self.clock[0], self.reporter.conductor
        name = self.rng.choice(sorted(self.live)) if self.live else ""
        if not name or self.rng.random() < 0.4:
            name = f"r{number}"
            conductor.route(ask(name, 1 + number % 6, first=100 * number, owner=OWNER), now)
            self.live[name] = 0
        elif self.live[name] == 0:
            conductor.prefilled(name, now)
            decode = self.reporter.slots[self.rng.choice(["d0", "d1"])]
            conductor.book.rebind(name, decode, now)
            self.live[name] = 1
        elif self.live[name] == 1:
            conductor.joined(name, now)
            self.live[name] = 2
        else:
            conductor.finished(name, now)
            del self.live[name]
        self.loop.run_until_complete(asyncio.sleep(0))

    def snapshot(self) -> None:
        """Send a complete snapshot, with nothing between its reports."""
        self.reports.begin_snapshot()
        while self.reports.is_sending_snapshot:
            self.reports.send_portion()

    def what_is_reserved(self, member: Member) -> dict[str, tuple[object, str, str]]:
        """Stage and instances of the sender's requests, as a worker knows them."""
        names = member.conductor.fleet.names
        return {
            made.request.request_id: (made.stage, names[made.choice.slot], names[made.decode_slot])
            for made in member.conductor.book.of_owner(OWNER)
        }

    def agree(self) -> bool:
        return self.what_is_reserved(self.reporter) == self.what_is_reserved(self.receiver)


@pytest.mark.parametrize("seed", range(20))
def test_snapshot_repairs_lost_reports(seed: int) -> None:
    pair = TwoWorkers(0.2, seed)
    was_wrong = False
    for number in range(300):
        pair.step(number)
        was_wrong |= not pair.agree()
    assert was_wrong
    pair.loss = 0.0
    pair.snapshot()
    assert pair.agree()
    pair.loop.close()


@pytest.mark.parametrize("seed", range(20))
def test_changes_during_snapshot_are_kept(seed: int) -> None:
    pair = TwoWorkers(0.0, seed)
    for number in range(PORTION * 3):
        pair.reporter.conductor.route(ask(f"q{number}", 2, 100_000 + 10 * number, owner=OWNER), 0.0)
        pair.live[f"q{number}"] = 0
    pair.loop.run_until_complete(asyncio.sleep(0))
    pair.reports.begin_snapshot()
    number = 0
    while pair.reports.is_sending_snapshot:
        for _ in range(40):
            pair.step(number)
            number += 1
        pair.reports.send_portion()
        assert pair.agree()
    pair.loop.close()


def test_incomplete_snapshot_ends_no_reservation() -> None:
    pair = TwoWorkers(0.0, 1)
    for number in range(PORTION + 1):
        pair.reporter.conductor.route(ask(f"q{number}", 2, 10 * number, owner=OWNER), 0.0)
    pair.loop.run_until_complete(asyncio.sleep(0))
    pair.reports.begin_snapshot()
    pair.loss = 1.0
    pair.reports.send_portion()
    pair.loss = 0.0
    while pair.reports.is_sending_snapshot:
        pair.reports.send_portion()
    assert pair.agree()
    assert len(pair.receiver.conductor.book) == PORTION + 1
    pair.loop.close()
