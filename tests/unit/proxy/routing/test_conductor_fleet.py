"""Requests on a conductor's instances, while these come, leave and fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from mooncake_proxy.config import ConductorConfig
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import Compatibility, Instance, InstancePool, InstanceSpec, Role
from mooncake_proxy.pool.kv_event_feed import KVEventFeed
from mooncake_proxy.routing.conductor_fleet import ConductorFleet, RoutedRequest


@dataclass
class Bench:
    """A conductor with instances p0, p1, ... and d0, d1, ... that publish nothing."""

    pool: InstancePool
    fleet: ConductorFleet
    prefills: list[Instance]
    decodes: list[Instance]

    def place(self, now: float = 0.0) -> RoutedRequest:
        routed = self.fleet.place(
            num_tokens=1000,
            keys=(1, 2, 3),
            token_limit=100,
            request_class="default",
            now=now,
        )
        assert routed is not None
        return routed

    def prefiller(self, routed: RoutedRequest) -> Instance | None:
        return self.fleet.instance(routed.decision.prefill.slot)

    def decoder(self, routed: RoutedRequest) -> Instance | None:
        return self.fleet.instance(routed.decode_slot)

    def decode(self, routed: RoutedRequest, now: float = 0.0) -> Instance | None:
        """It is prefilled, and decodes; where."""
        self.fleet.prefilled(routed, now)
        self.fleet.decoding(routed, now)
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


def test_kv_of_an_instance_that_has_left_goes_where_it_still_fits() -> None:
    """A rolling update: d0 is as old as p0, and can't take what the new p1 has."""

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
