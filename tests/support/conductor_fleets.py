"""Small fleets for the tests of the conductor."""

from __future__ import annotations

import random

from mooncake_conductor.conductor import Conductor, ConductorSettings
from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.fleet import Fleet, InstanceSpec, Role
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.policies.situation import RoutingRequest, Situation

LATENCY = LatencyModel(0.1, 1e-4, 1e-9, 0.02, 1e-4, 3e-8)
CHUNK = 512


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
    return RoutingRequest(name, num_chunks * CHUNK + 1, keys, **fields)


def situation(conductor: Conductor, request: RoutingRequest, now: float) -> Situation:
    match = conductor.index.match(request.keys, now)
    return Situation(conductor.fleet, request, match, now, random.Random(1))


def hold(conductor: Conductor, slot: int, num_chunks: int, tier: Tier = Tier.DEVICE) -> None:
    conductor.index.stored(slot, tier, range(num_chunks))
