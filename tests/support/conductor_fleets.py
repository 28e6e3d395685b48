"""Small fleets for the tests of the conductor."""

from __future__ import annotations

import random

from mooncake_conductor.conductor import Conductor, ConductorSettings
from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.fleet import Fleet, InstanceSpec, Role
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.policies.situation import RoutingRequest, Situation
from mooncake_conductor.shared_reservations import ReservationExchange

LATENCY = LatencyModel(0.1, 1e-4, 1e-9, 0.02, 1e-4, 3e-8)
CHUNK = 512
NAMES = ["p0", "p1", "p2", "d0", "d1"]


def make_fleet(num_prefill: int, num_decode: int = 1, link_gb_s: float = 10.0, **spec) -> Fleet:
    fleet = Fleet(
        num_prefill + num_decode, chunk_tokens=CHUNK, kv_bytes_per_token=327_680, num_layers=80
    )
    for number in range(num_prefill):
        fleet.add(InstanceSpec(f"p{number}", Role.PREFILL, LATENCY, link_gb_s=link_gb_s, **spec))
    for number in range(num_decode):
        fleet.add(InstanceSpec(f"d{number}", Role.DECODE, LATENCY, link_gb_s=link_gb_s, **spec))
    return fleet


def make_conductor(
    num_prefill: int, num_decode: int = 1, link_gb_s: float = 10.0, **settings
) -> Conductor:
    fleet = make_fleet(num_prefill, num_decode, link_gb_s)
    return Conductor(fleet, ConductorSettings(**settings), random.Random(1))


def ask(name: str, num_chunks: int, first: int = 0, **fields) -> RoutingRequest:
    keys = tuple(range(first, first + num_chunks))
    return RoutingRequest(name, num_chunks * CHUNK + 1, keys, **{"deadline": 600.0} | fields)


def situation(conductor: Conductor, request: RoutingRequest, now: float) -> Situation:
    match = conductor.index.match(request.keys, now)
    return Situation(conductor.fleet, request, match, now, random.Random(1))


def hold(conductor: Conductor, slot: int, num_chunks: int, tier: Tier = Tier.DEVICE) -> None:
    conductor.index.stored(slot, tier, range(num_chunks))


class Member:
    """One of several conductors, with its own slot numbers for the same instances."""

    def __init__(self, owner: str, names: list[str]) -> None:
        fleet = Fleet(8, chunk_tokens=CHUNK, kv_bytes_per_token=327_680, num_layers=80)
        self.conductor = Conductor(fleet, ConductorSettings(), random.Random(1))
        self.slots = {
            name: self.conductor.add(
                InstanceSpec(name, Role.PREFILL if name[0] == "p" else Role.DECODE, LATENCY)
            )
            for name in names
        }
        self.owner = owner
        self.exchange = ReservationExchange(self.conductor.book, owner, fleet.names, self.slots.get)

    def loads(self, now: float) -> dict[str, tuple[float, float]]:
        """Seconds of queue (prefill) or number of sequences (decode) by instance."""
        fleet, ledger = self.conductor.fleet, self.conductor.ledger
        seconds = dict(
            zip(
                fleet.prefill_slots.tolist(),
                fleet.queues.seconds(fleet.prefill_slots, now),
                strict=True,
            )
        )
        bound = dict(zip(fleet.decode_slots.tolist(), ledger.reserved().num_sequences, strict=True))
        return {
            name: (round(float(seconds.get(slot, 0.0)), 6), float(bound.get(slot, 0.0)))
            for name, slot in self.slots.items()
        }
