"""Hot chunks are replicated if all their holders are busy, once per cool-down."""

from __future__ import annotations

import random

import pytest
from support.conductor_fleets import CHUNK, ask, hold, make_conductor

from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.cost.latency_model import cold_start
from mooncake_conductor.errors import ConductorConfigError
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.replication import Replication, ReplicationRule
from mooncake_conductor.simulator.simulation import Cluster, Simulation
from mooncake_conductor.simulator.trace_file import TraceRequest

RULE = ReplicationRule(busy_share=0.7, horizon_s=2.0, cooldown_s=60.0, min_heat=3.0)


def busy_conductor(num_requests: int = 5):
    """Slot 0 holds a hot prefix and is sending for 10 s, slot 1 is receiving for 1 s, slot 2 is
    idle."""
    conductor = make_conductor(3, replication=RULE)
    hold(conductor, 0, 8)
    for _ in range(num_requests):
        conductor.heat.touch(range(8), now=0.0)
    conductor.fleet.links.sending_until[0] = 10.0
    conductor.fleet.links.receiving_until[1] = 1.0
    return conductor


def proposed(conductor, now: float = 0.0) -> tuple[Replication, ...]:
    return conductor.route(ask("r", 8), now=now).replications


def test_hot_run_is_copied_to_the_instance_with_the_earliest_free_link() -> None:
    assert proposed(busy_conductor()) == (Replication(0, 2, tuple(range(8))),)


def test_cold_run_or_idle_holder_is_not_replicated() -> None:
    assert proposed(busy_conductor(num_requests=0)) == ()
    conductor = busy_conductor()
    conductor.fleet.links.sending_until[0] = 1.3
    assert proposed(conductor) == ()


def test_one_idle_holder_prevents_replication() -> None:
    conductor = busy_conductor()
    hold(conductor, 1, 8)
    assert proposed(conductor) == ()
    conductor.fleet.links.sending_until[1] = 10.0
    assert proposed(conductor, now=0.1) == (Replication(0, 2, tuple(range(8))),)


def test_replication_is_limited_by_the_cool_down() -> None:
    conductor = busy_conductor()
    conductor.fleet.links.sending_until[0] = 1000.0
    made = [bool(proposed(conductor, now)) for now in (0.0, 1.0, 59.0, 61.0)]
    assert made == [True, False, False, True]


def test_hotter_chunks_are_not_evicted_by_copies() -> None:
    conductor = busy_conductor()
    for slot in (1, 2):
        conductor.index.stored(slot, Tier.HOST, [999])
        conductor.reports.report(slot, 999)
    for _ in range(50):
        conductor.heat.touch([999], now=0.0)
    assert proposed(conductor) == ()


def test_invalid_replication_rule_is_rejected() -> None:
    with pytest.raises(ConductorConfigError, match="0 < busy share <= 1"):
        ReplicationRule(busy_share=0.0)


def hot_trace(num_requests: int) -> list[TraceRequest]:
    """Return requests with a long shared prefix and a question of their own each."""
    rng, shared = random.Random(3), tuple(range(64))
    return [
        TraceRequest(
            number * 0.4 + rng.random() * 0.1,
            (64 + 4) * CHUNK,
            20,
            (*shared, *range(1000 + 4 * number, 1004 + 4 * number)),
        )
        for number in range(num_requests)
    ]


def test_simulated_replication_keeps_the_index_exact_and_ttft_low() -> None:
    cluster = Cluster(6, 4, cold_start("llama-3-70b", "A800", 8), link_gb_s=6.0)
    simulation = Simulation(cluster, ConductorSettings(replication=ReplicationRule()))
    result = simulation.run(hot_trace(120))
    assert result.num_replications > 0
    for slot, node in simulation._prefill.items():
        count = simulation.conductor.index.num_held(slot, Tier.HOST)
        assert count == len(node.cache)
    without = Simulation(cluster, ConductorSettings()).run(hot_trace(120))
    mean = [sum(r.ttft for r in each.records) / 120 for each in (result, without)]
    assert mean[0] <= 1.02 * mean[1]
