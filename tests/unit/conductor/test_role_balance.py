"""Roles change only after a lasting shift of load, and only on drained instances."""

from __future__ import annotations

import pytest
from support.conductor_fleets import ask, make_conductor

from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.cost.latency_model import cold_start
from mooncake_conductor.errors import ConductorConfigError
from mooncake_conductor.fleet import Role
from mooncake_conductor.role_balance import (
    Balance,
    FleetLoad,
    RoleBalancer,
    RoleChange,
    RoleChanges,
    RoleRule,
)
from mooncake_conductor.simulator.results import summarise
from mooncake_conductor.simulator.simulation import Cluster, Simulation
from mooncake_conductor.simulator.trace_file import TraceRequest
from mooncake_conductor.slo_admission import Objective, Objectives

RULE = RoleRule(high=0.9, low=0.5, hold_s=30.0)


def load(prefill: float, decode: float) -> FleetLoad:
    return FleetLoad(prefill, decode, 4, 4)


def test_balance_state_has_hysteresis() -> None:
    balancer = RoleBalancer(RULE)
    seen = [
        balancer.observe(load(*at), now)
        for now, at in enumerate([(0.89, 0.1), (0.95, 0.1), (0.8, 0.3), (0.71, 0.6), (0.69, 0.1)])
    ]
    short = Balance.SHORT_OF_PREFILL
    assert seen == [Balance.EVEN, short, short, short, Balance.EVEN]
    assert balancer.observe(load(0.1, 0.95), 9.0) is Balance.SHORT_OF_DECODE
    assert balancer.observe(load(0.8, 0.95), 10.0) is Balance.EVEN


def test_shortage_of_both_roles_is_left_to_the_autoscaler() -> None:
    balancer = RoleBalancer(RULE)
    assert balancer.observe(load(2.0, 2.0), 0.0) is Balance.EVEN
    assert load(1.4, 0.35).desired_instances(0.7) == (8, 2)
    assert load(0.0, 0.0).desired_instances() == (1, 1)


def test_change_is_proposed_after_a_delay_for_the_least_loaded_instance() -> None:
    conductor = make_conductor(2, 3)
    for number in range(4):
        conductor.ledger.bind(f"r{number}", 2 + number % 2, 0.0, 100, "default")
    balancer = RoleBalancer(RULE)

    def propose(now: float) -> RoleChange | None:
        return balancer.propose(conductor.fleet, conductor.ledger, load(2.0, 0.1), now)

    assert [propose(now) for now in (0.0, 29.0)] == [None, None]
    assert propose(30.0) == RoleChange(4, Role.PREFILL)
    assert propose(31.0) is None


def test_each_role_keeps_one_instance() -> None:
    conductor = make_conductor(2, 1)
    balancer = RoleBalancer(RULE)
    proposals = [
        balancer.propose(conductor.fleet, conductor.ledger, load(2.0, 0.1), now)
        for now in (0.0, 100.0)
    ]
    assert proposals == [None, None]


def overloaded(num_prefill: int = 1, num_decode: int = 2):
    conductor = make_conductor(num_prefill, num_decode)
    conductor.fleet.queues.enter(0, "long", 1000.0, 1, now=0.0)
    changes = RoleChanges(conductor.fleet, conductor.book, conductor.ledger, RULE, 10.0)
    return conductor, changes


def test_instance_drains_before_its_role_changes() -> None:
    conductor, changes = overloaded()
    decision = conductor.route(ask("r", 1), now=0.0)
    assert [changes.tick(now) for now in (0.0, 30.0)] == [None, None]
    (drained,) = conductor.fleet.is_draining.nonzero()[0]
    assert drained != decision.decode.slot
    later = {conductor.route(ask(f"s{n}", 1), now=31.0).decode.slot for n in range(8)}
    assert later == {decision.decode.slot}
    change = changes.tick(45.0)
    assert change == RoleChange(int(drained), Role.PREFILL)
    conductor.fleet.set_role(change.slot, change.role)
    assert conductor.fleet.prefill_slots.tolist() == [0, change.slot]
    assert not conductor.fleet.is_draining.any()


def test_busy_instance_keeps_its_role_and_stops_draining_when_load_reverses() -> None:
    conductor, changes = overloaded(num_decode=2)
    for slot in (1, 2):
        name = f"on {slot}"
        conductor.route(ask(name, 1), now=0.0)
        conductor.book.rebind(name, slot, now=0.0)
    assert [changes.tick(now) for now in (0.0, 30.0, 45.0, 60.0)] == [None] * 4
    assert conductor.fleet.is_draining.sum() == 1
    conductor.fleet.queues.clear(0)
    assert changes.tick(75.0) is None
    assert conductor.fleet.is_draining.sum() == 0


def test_invalid_role_rule_is_rejected() -> None:
    with pytest.raises(ConductorConfigError, match="0 < low < high"):
        RoleRule(high=0.4, low=0.5)
    conductor = make_conductor(1)
    with pytest.raises(ConductorConfigError, match="an objective for the first token"):
        RoleChanges(conductor.fleet, conductor.book, conductor.ledger, RULE, float("inf"))


def test_simulated_load_shift_changes_roles() -> None:
    """Long prompts and short answers on 1 prefill node and 7 decode nodes."""
    requests = [
        TraceRequest(0.8 * number, 16 * 512, 20, tuple(range(16 * number, 16 * number + 16)))
        for number in range(500)
    ]
    cluster = Cluster(1, 7, cold_start("llama-3-70b", "A800", 8))
    settings = ConductorSettings(objectives=Objectives(Objective(10.0, 0.1)))
    fixed = Simulation(cluster, settings).run(requests)
    simulation = Simulation(cluster, settings, roles=RULE)
    moved = simulation.run(requests)
    assert [role for _, _, role in moved.role_changes][:1] == ["prefill"]
    assert all(record.ended_at is not None for record in moved.records)
    assert (len(simulation.conductor.book), len(simulation.conductor.ledger)) == (0, 0)
    ttft = [summarise(each, Objective()).mean_ttft for each in (moved, fixed)]
    assert ttft[0] < 0.5 * ttft[1]
