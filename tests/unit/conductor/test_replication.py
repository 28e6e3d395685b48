"""Hot chunks are copied when all who hold them will be busy, once per cool-down."""

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
    """Slot 0 holds a hot prefix and has to send for 10 s; slots 1 and 2 are idle."""
    conductor = make_conductor(3, replication=RULE)
    hold(conductor, 0, 8)
    for _ in range(num_requests):
        conductor.heat.touch(range(8), now=0.0)
    conductor.fleet.links.sending_until[0] = 10.0
    conductor.fleet.links.receiving_until[1] = 1.0
    return conductor


def proposed(conductor, now: float = 0.0) -> tuple[Replication, ...]:
    return conductor.route(ask("r", 8), now=now).replications


def test_a_hot_run_goes_to_whoever_is_soonest_free_to_receive() -> None:
    assert proposed(busy_conductor()) == (Replication(0, 2, tuple(range(8))),)


def test_nothing_is_copied_that_is_not_hot_or_whose_holder_is_free() -> None:
    assert proposed(busy_conductor(num_requests=0)) == ()
    conductor = busy_conductor()
    conductor.fleet.links.sending_until[0] = 1.3
    assert proposed(conductor) == ()


def test_one_holder_that_is_free_is_enough() -> None:
    conductor = busy_conductor()
    hold(conductor, 1, 8)
    assert proposed(conductor) == ()
    conductor.fleet.links.sending_until[1] = 10.0
    assert proposed(conductor, now=0.1) == (Replication(0, 2, tuple(range(8))),)


def test_a_key_cools_down() -> None:
    conductor = busy_conductor()
    conductor.fleet.links.sending_until[0] = 1000.0
    made = [bool(proposed(conductor, now)) for now in (0.0, 1.0, 59.0, 61.0)]
    assert made == [True, False, False, True]


def test_what_is_hotter_is_not_pushed_out() -> None:
    conductor = busy_conductor()
    for slot in (1, 2):
        conductor.index.stored(slot, Tier.HOST, [999])
        conductor.reports.report(slot, 999)
    for _ in range(50):
        conductor.heat.touch([999], now=0.0)
    assert proposed(conductor) == ()


def test_settings_of_no_sense_are_refused() -> None:
    with pytest.raises(ConductorConfigError, match="0 < busy share <= 1"):
        ReplicationRule(busy_share=0.0)


def hot_trace(num_requests: int) -> list[TraceRequest]:
    """A long shared prefix that all ask for, and a question of its own each."""
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


def test_copies_made_ahead_are_found_in_the_simulator() -> None:
    cluster = Cluster(6, 4, cold_start("llama-3-70b", "A800", 8), link_gb_s=6.0)
    simulation = Simulation(cluster, ConductorSettings(replication=ReplicationRule()))
    result = simulation.run(hot_trace(120))
    assert result.num_replications > 0
    for slot, node in simulation._prefill.items():
        count, _ = simulation.conductor.index.digest(slot, Tier.HOST)
        assert count == len(node.cache)
    without = Simulation(cluster, ConductorSettings()).run(hot_trace(120))
    mean = [sum(r.ttft for r in each.records) / 120 for each in (result, without)]
    assert mean[0] <= 1.02 * mean[1]
