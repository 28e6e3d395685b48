"""Placed requests while a conductor's instances are added, removed and fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mooncake_conductor.reservations import ReservationEvent
from mooncake_conductor.shared_reservations import Moved, Reserved
from mooncake_proxy.config import ConductorConfig
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instance_reports import Compatibility
from mooncake_proxy.pool.instances import Instance, InstancePool, InstanceSpec, Role
from mooncake_proxy.pool.kv_event_feed import KVEventFeed
from mooncake_proxy.routing.conductor_fleet import ConductorFleet, RoutedRequest


@dataclass
class Bench:
    """A conductor with instances p0, p1, ... and d0, d1, ..., which publish no KV events."""

    pool: InstancePool
    fleet: ConductorFleet
    prefills: list[Instance]
    decodes: list[Instance]

    def place(self) -> RoutedRequest:
        routed = self.try_to_place()
        assert routed is not None
        return routed

    def try_to_place(self) -> RoutedRequest | None:
        return self.fleet.place(
            num_tokens=1000,
            keys=(1, 2, 3),
            token_limit=100,
            request_class="default",
            deadline=3600.0,
            now=0.0,
        )

    def can_place(self) -> bool:
        return self.try_to_place() is not None

    def prefiller(self, routed: RoutedRequest) -> Instance | None:
        return self.fleet.instance(routed.decision.prefill.slot)

    def decoder(self, routed: RoutedRequest) -> Instance | None:
        return self.fleet.instance(routed.decode_slot)

    def decode(self, routed: RoutedRequest) -> Instance | None:
        """Complete the prefill and start the decode; returns its instance."""
        self.fleet.prefilled(routed, 0.0)
        self.fleet.decoding(routed, 0.0)
        return self.decoder(routed)


def on_bench(num_prefills: int, num_decodes: int, test: Callable[[Bench], None]) -> None:
    async def main() -> None:
        pool = InstancePool(ClientContext())

        def add(host: str, role: Role) -> Instance:
            return pool.add(InstanceSpec(Origin("http", host, 80), role))

        prefills = [add(f"p{number}", Role.PREFILL) for number in range(num_prefills)]
        decodes = [add(f"d{number}", Role.DECODE) for number in range(num_decodes)]
        rng = random.Random(1)
        fleet = ConductorFleet(pool, ConductorConfig(), _no_feed, is_coupled=False, rng=rng)
        test(Bench(pool, fleet, prefills, decodes))

    asyncio.run(main())


def _no_feed() -> KVEventFeed:
    raise AssertionError("no instance publishes")


def test_kv_of_removed_instance_goes_to_compatible_decode() -> None:
    """A rolling update: d0 has the version of p0 and is incompatible with the new p1."""

    def test(bench: Bench) -> None:
        (old, new), (d0, d1, d2) = bench.prefills, bench.decodes
        for instance in bench.pool:
            bench.pool.note_compatibility(instance, Compatibility(engine_id=instance.name))
        refusing = Compatibility(engine_id=old.name, refused_peers=frozenset({d2.name}))
        bench.pool.note_compatibility(old, refusing)
        refusing = Compatibility(engine_id=new.name, refused_peers=frozenset({d0.name, d1.name}))
        bench.pool.note_compatibility(new, refusing)
        routed = bench.place()
        while bench.prefiller(routed) is not old:
            routed = bench.place()
        bench.fleet.prefilled(routed, 1.0)
        first = bench.decoder(routed)
        assert first in (d0, d1)
        bench.pool.remove(old.name)
        bench.fleet.decode_elsewhere(routed, [first], 2.0)
        assert bench.decoder(routed) is (d1 if first is d0 else d0)

    on_bench(2, 3, test)


def test_prefill_instance_that_fits_no_decode_instance_is_avoided() -> None:
    """A rolling update that has begun with the prefill instances."""

    def test(bench: Bench) -> None:
        old, new = bench.prefills
        for instance in bench.pool:
            bench.pool.note_compatibility(instance, Compatibility(engine_id=instance.name))
        refused = frozenset(decode.name for decode in bench.decodes)
        unfit = Compatibility(engine_id=new.name, refused_peers=refused)
        bench.pool.note_compatibility(new, unfit)
        assert {bench.prefiller(bench.place()) for _ in range(20)} == {old}
        again = bench.fleet.place_again(bench.place(), [], 0.0)
        assert again is not None
        assert bench.prefiller(again) is old
        bench.pool.note_compatibility(new, Compatibility(engine_id=new.name))
        assert bench.prefiller(bench.place()) is new, "it is idle, and fits now"

    on_bench(2, 2, test)


@pytest.mark.parametrize("how", ["down", "drained"])
def test_running_requests_count_again_when_instance_returns(
    how: str,
) -> None:
    def test(bench: Bench) -> None:
        d0 = bench.decodes[0]
        for _ in range(40):
            bench.decode(bench.place())
        if how == "down":
            bench.pool.set_up(d0, up=False, error="checks came late")
        else:
            bench.pool.drain(d0.name)
        assert {bench.decode(bench.place()) for _ in range(5)} == {bench.decodes[1]}
        bench.pool.set_up(d0, up=True)
        bench.pool.resume(d0.name)
        chosen = [bench.decode(bench.place()) for _ in range(40)]
        assert 20 <= chosen.count(d0) <= 25, "exactly 5 fewer run there"

    on_bench(1, 2, test)


def test_prefilled_request_is_rebound_if_its_decode_is_down() -> None:
    def test(bench: Bench) -> None:
        routed = bench.place()
        bound = bench.decoder(routed)
        assert bound is not None
        bench.pool.set_up(bound, up=False, error="gone")
        bench.fleet.sweep(0.0)
        assert bench.decode(routed) is next(d for d in bench.decodes if d is not bound)
        bench.fleet.finished(routed, 10, 0.01, 1.0)
        assert len(bench.fleet.conductor.book) == len(bench.fleet.conductor.ledger) == 0

    on_bench(1, 2, test)


@pytest.mark.parametrize("side", ["prefills", "decodes"])
def test_nothing_is_placed_while_one_side_is_down_and_running_continues(side: str) -> None:
    def test(bench: Bench) -> None:
        waiting, running = bench.place(), bench.place()
        bench.decode(running)
        for instance in getattr(bench, side):
            bench.pool.set_up(instance, up=False, error="gone")
        bench.fleet.sweep(0.0)
        assert not bench.can_place()
        bench.decode(waiting)
        bench.fleet.decode_elsewhere(waiting, bench.decodes, 1.0)
        for routed in (waiting, running):
            bench.fleet.finished(routed, 10, 0.01, 2.0)
        assert len(bench.fleet.conductor.book) == len(bench.fleet.conductor.ledger) == 0
        for instance in getattr(bench, side):
            bench.pool.set_up(instance, up=True)
        assert bench.can_place()

    on_bench(1, 2, test)


def test_removal_and_role_change_drop_reservations() -> None:
    def test(bench: Bench) -> None:
        for _ in range(20):
            bench.decode(bench.place())
        d0, d1 = bench.decodes
        bench.pool.remove(d0.name)
        bench.pool.switch_role(d1.name, Role.BOTH)
        bench.fleet.sweep(1.0)
        assert len(bench.fleet.conductor.book) == 0

    on_bench(1, 2, test)


def test_index_of_instance_is_cleared_when_down() -> None:
    def test(bench: Bench) -> None:
        (p0,) = bench.prefills
        index, keys = bench.fleet.conductor.index, (1, 2, 3)
        bench.decode(bench.place())
        slot = bench.fleet.slot(p0)
        assert index.match(keys, 0.0).local[slot] == 3
        bench.pool.drain(p0.name)
        bench.fleet.sweep(0.0)
        assert index.match(keys, 0.0).local[slot] == 3
        bench.pool.set_up(p0, up=False, error="gone")
        bench.fleet.sweep(0.0)
        assert index.match(keys, 0.0).local[slot] == 0

    on_bench(1, 1, test)


@pytest.mark.parametrize("how", ["pushed", "of another process"])
def test_measured_prefill_begins_after_the_one_before_whoever_reported_it(how: str) -> None:
    def test(bench: Bench) -> None:
        measured: list[float] = []
        fleet = bench.fleet
        fleet.conductor.measured_prefill = (  # type: ignore[method-assign]
            lambda slot, num_tokens, num_cached, seconds: measured.append(seconds)
        )
        [p0] = bench.prefills
        if how == "pushed":
            fleet.pushed(bench.place(), 1.0)
        else:
            reserved = Reserved(
                "r",
                p0.name,
                bench.decodes[0].name,
                1000,
                0,
                1.0,
                "",
                b"",
                ttft=1.0,
                queue=0.0,
                load=0.0,
                compute=1.0,
                lifetime_s=9.0,
            )
            fleet.sync_with_pool(0.0)
            fleet.apply("another", [reserved], 0.0)
            fleet.apply("another", [Moved("r", ReservationEvent.PREFILLED)], 1.0)
        fleet.measure_prefill(p0, 1000, 0, began=0.0, now=1.1)
        assert measured == pytest.approx([0.1])

    on_bench(1, 1, test)


def test_long_stream_counts_as_load_until_its_request_is_given_up() -> None:
    def test(bench: Bench) -> None:
        bench.decode(bench.place())
        for now, num_sequences in ((3599.0, 1), (3600.0, 0)):
            bench.fleet.sweep(now)
            assert bench.fleet.conductor.ledger.now().num_sequences.sum() == num_sequences

    on_bench(1, 1, test)
