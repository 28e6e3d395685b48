"""Routing constraints: avoided and unavailable instances, incompatible pairs, coupled instances."""

from __future__ import annotations

import random

import pytest
from support.conductor_fleets import CHUNK, LATENCY, ask, hold, make_conductor

from mooncake_conductor.conductor import Conductor, ConductorSettings
from mooncake_conductor.fleet import Fleet, InstanceSpec, Role
from mooncake_conductor.policies.policy_names import POLICIES
from mooncake_conductor.slo_admission import Objectives, objective


@pytest.mark.parametrize("policy", POLICIES)
def test_avoided_instances_are_used_only_if_all_are_avoided(policy: str) -> None:
    conductor = make_conductor(3, 2, policy=policy)
    hold(conductor, 0, 4)
    for number in range(12):
        avoid = frozenset((0, 2, 3))
        decision = conductor.route(ask(f"a{number}", 4, avoid=avoid), 0.0)
        assert (decision.prefill.slot, decision.decode.slot) == (1, 4)
    decision = conductor.route(ask("everywhere", 4, avoid=frozenset(range(5))), 0.0)
    assert decision.prefill.slot in (0, 1, 2)
    assert decision.decode.slot in (3, 4)


def test_decode_instance_is_compatible_with_the_prefill_instance() -> None:
    conductor = make_conductor(2, 3)
    pairs = {0: frozenset((2,)), 1: frozenset((3,))}
    for number in range(12):
        request = ask(f"r{number}", 2, first=10 * number, receivers=pairs.__getitem__)
        decision = conductor.route(request, 0.0)
        assert decision.decode.slot in pairs[decision.prefill.slot]
        _, slot = conductor.prefilled(request.request_id, 1.0)
        assert slot in pairs[decision.prefill.slot]


def test_failed_decode_is_retried_on_another_instance() -> None:
    conductor = make_conductor(1, 3)
    decision = conductor.route(ask("r", 2), 0.0)
    conductor.prefilled("r", 1.0)
    failed = frozenset((decision.decode.slot,))
    slot = conductor.decode_elsewhere("r", failed, 1.0)
    assert slot is not None
    assert slot not in failed
    conductor.joined("r", 2.0)
    assert conductor.decode_elsewhere("r", frozenset((slot,)), 2.0) is None
    conductor.finished("r", 3.0)
    assert conductor.decode_elsewhere("r", frozenset(), 3.0) is None
    assert len(conductor.ledger) == 0


def test_unavailable_instance_is_not_chosen_and_keeps_its_reservations() -> None:
    conductor = make_conductor(2, 2)
    for number in range(20):
        conductor.route(ask(f"r{number}", 2, first=10 * number), 0.0)
        conductor.joined(f"r{number}", 0.0)
    fleet, before = conductor.fleet, conductor.ledger.now().num_sequences.tolist()
    for slot in (0, 2):
        fleet.set_away(slot)
    for number in range(20, 30):
        decision = conductor.route(ask(f"r{number}", 2, first=10 * number), 0.0)
        assert (decision.prefill.slot, decision.decode.slot) == (1, 3)
        conductor.ended(f"r{number}", 0.0)
    for slot in (0, 2):
        fleet.set_away(slot, False)
    assert conductor.ledger.now().num_sequences.tolist() == before


def test_running_requests_survive_while_a_whole_pool_is_unavailable() -> None:
    objectives = Objectives(objective("10x", "10x"))
    conductor = make_conductor(1, 2, objectives=objectives, binds_late=True)
    conductor.route(ask("r", 2), 0.0)
    conductor.fleet.set_away(0)
    _, slot = conductor.prefilled("r", 1.0)
    assert slot in (1, 2)
    for slot in (1, 2):
        conductor.fleet.set_away(slot)
    assert conductor.prefilled("r", 1.0)[1] is None
    assert conductor.decode_elsewhere("r", frozenset((1,)), 1.0) is None
    conductor.finished("r", 2.0)
    assert len(conductor.book) == len(conductor.ledger) == 0


def test_coupled_instance_decodes_its_own_prefills() -> None:
    fleet = Fleet(3, chunk_tokens=CHUNK, kv_bytes_per_token=1e5, num_layers=8)
    conductor = Conductor(fleet, ConductorSettings(is_coupled=True), random.Random(1))
    for number in range(3):
        conductor.add(InstanceSpec(f"b{number}", Role.BOTH, LATENCY))
    for number in range(9):
        decision = conductor.route(ask(f"r{number}", 2, first=10 * number), 0.0)
        assert decision.prefill.slot == decision.decode.slot
        assert conductor.prefilled(f"r{number}", 1.0)[1] == decision.decode.slot
