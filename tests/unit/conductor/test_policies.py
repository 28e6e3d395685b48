"""Policies: Mooncake's published algorithm exactly, and properties of every policy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st
from support.conductor_fleets import CHUNK, LATENCY, ask, hold, make_conductor, situation

from mooncake_conductor.errors import ConductorConfigError, UnknownInstance
from mooncake_conductor.fleet import InstanceSpec, Role
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.policies.heat import HeatMeter
from mooncake_conductor.policies.mooncake_policy import Boundary, MooncakePolicy
from mooncake_conductor.policies.policy_names import POLICIES
from mooncake_conductor.policies.situation import Plan, behind_queue

EVERY = pytest.mark.parametrize("policy", sorted(POLICIES))


def algorithm_1(own, queues, sending, num_chunks, threshold: float, form: Boundary):
    """The paper's pseudo-code, line by line, in scalars; returns the TTFT of each instance.

    ``own`` has prefix lengths in chunks. A ratio to a length of 0 is infinite if any instance has
    a prefix, else 1.
    """
    n = num_chunks * CHUNK + 1
    best_len = max(own)
    holders = [i for i, length in enumerate(own) if length == best_len]
    best_instance = min(holders, key=lambda i: sending[i])

    def prefill_time(reused_chunks: int) -> float:
        reused = min(reused_chunks * CHUNK, n - 1)
        return LATENCY.prefill_seconds(n, reused)

    def transfer_time(length: int) -> float:
        return max(sending[best_instance], 0.0) + 0.002 + length * CHUNK * 327_680 / 10e9

    ttft = []
    for i, prefix_len in enumerate(own):
        ratio = best_len / prefix_len if prefix_len else (math.inf if best_len else 1.0)
        if form is Boundary.ARXIV:
            recomputes = ratio < threshold or best_len == prefix_len
        else:
            recomputes = not ratio > threshold or best_len == prefix_len
        if recomputes:
            ttft.append(queues[i] + prefill_time(prefix_len))
        else:
            transfer_len = best_len - prefix_len
            ttft.append(transfer_time(transfer_len) + queues[i] + prefill_time(best_len))
    return ttft


@given(
    st.lists(
        st.tuples(st.integers(0, 16), st.floats(0, 5), st.floats(0, 3)), min_size=1, max_size=6
    ),
    st.integers(1, 16),
    st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    st.sampled_from(Boundary),
)
@settings(deadline=None, max_examples=300)
def test_mooncake_policy_follows_the_pseudo_code(state, num_chunks, threshold, form) -> None:
    conductor = make_conductor(len(state))
    own = [min(length, num_chunks) for length, _, _ in state]
    for slot, (_, queue, sending) in enumerate(state):
        hold(conductor, slot, own[slot])
        conductor.fleet.queues.enter(slot, f"before {slot}", queue, 1, now=0.0)
        conductor.fleet.links.sending_until[slot] = sending
    seen = situation(conductor, ask("r", num_chunks), now=0.0)
    choice = MooncakePolicy(threshold, form).choose(seen)
    queues, sending = ([s[part] for s in state] for part in (1, 2))
    wanted = algorithm_1(own, queues, sending, num_chunks, threshold, form)
    assert choice.slot in [i for i, ttft in enumerate(wanted) if ttft <= min(wanted) + 1e-9]
    if choice.plan is Plan.FETCH:
        assert choice.ttft == pytest.approx(wanted[choice.slot])


def test_threshold_variants_differ_only_at_equality() -> None:
    import numpy as np

    own = np.array([0, 1, 2, 3, 4])
    arxiv = MooncakePolicy(2.0, Boundary.ARXIV).is_far_behind(4, own).tolist()
    fast = MooncakePolicy(2.0, Boundary.FAST).is_far_behind(4, own).tolist()
    assert arxiv == [True, True, True, False, False]
    assert fast == [True, True, False, False, False]
    assert not MooncakePolicy().is_far_behind(0, own * 0).any()


@EVERY
def test_prompt_without_a_cached_prefix_is_routed(policy: str) -> None:
    conductor = make_conductor(3, policy=policy)
    decision = conductor.route(ask("r", 4), now=0.0)
    assert decision.prefill.num_reused == 0
    assert math.isfinite(decision.prefill.ttft)
    assert conductor.route(ask("no chunk", 0), now=0.0).verdict.is_admitted


@EVERY
def test_fully_cached_prompt_computes_its_last_token(policy: str) -> None:
    conductor = make_conductor(1, policy=policy)
    hold(conductor, 0, 4)
    request = ask("r", 4)
    request = type(request)("r", 4 * CHUNK, request.keys)
    assert conductor.route(request, now=0.0).prefill.num_reused == 4 * CHUNK - 1


@EVERY
def test_distinct_prompts_are_spread(policy: str) -> None:
    """Of 400 different prompts, each of four instances gets between 1/3 and 3 times its share."""
    conductor = make_conductor(4, policy=policy)
    hold(conductor, 0, 1)
    counts = [0] * 4
    for number in range(400):
        request = ask(f"r{number}", 8, first=10 + 100 * number)
        shared = type(request)(request.request_id, request.num_tokens, (0, *request.keys))
        counts[conductor.route(shared, now=0.0).prefill.slot] += 1
    assert min(counts) >= 100 / 3
    assert max(counts) <= 300


@given(
    st.integers(1, 16),
    st.integers(0, 16),
    st.integers(0, 16),
    st.floats(0, 10),
    st.floats(0.01, 10),
)
@settings(deadline=None, max_examples=200)
@pytest.mark.parametrize("policy", ["mooncake", "cost", "cache-local"])
def test_longer_queues_never_lower_the_expected_ttft(
    policy: str, num_chunks: int, own: int, others: int, queue: float, more: float
) -> None:
    expected = []
    for wait in (queue, queue + more):
        conductor = make_conductor(2, policy=policy)
        hold(conductor, 0, min(own, num_chunks))
        hold(conductor, 1, min(others, num_chunks))
        for slot in (0, 1):
            conductor.fleet.queues.enter(slot, f"before {slot}", wait, 1, now=0.0)
        expected.append(conductor.route(ask("r", num_chunks), now=0.0).prefill.ttft)
    assert expected[0] <= expected[1] + 1e-9


def test_cost_policy_fetches_from_a_busy_holder_unless_the_link_is_busy() -> None:
    conductor = make_conductor(2)
    hold(conductor, 0, 32)
    conductor.fleet.queues.enter(0, "long", 60.0, 1, now=0.0)
    choice = conductor.route(ask("r", 32), now=0.0).prefill
    assert (choice.slot, choice.plan) == (1, Plan.FETCH)
    assert [(f.source, f.start, f.num_chunks) for f in choice.fetches] == [(0, 0, 32)]
    conductor.fleet.links.sending_until[0] = 100.0
    choice = conductor.route(ask("s", 32), now=0.0).prefill
    assert choice.plan is not Plan.FETCH


def test_cost_policy_fetches_a_prefix_from_several_holders() -> None:
    conductor = make_conductor(3)
    conductor.index.stored(0, Tier.DEVICE, range(16))
    conductor.index.stored(1, Tier.DEVICE, range(16, 32))
    for slot in (0, 1):
        conductor.fleet.queues.enter(slot, f"long {slot}", 60.0, 1, now=0.0)
    choice = conductor.route(ask("r", 32), now=0.0).prefill
    assert choice.slot == 2
    assert [(f.source, f.start, f.num_chunks) for f in choice.fetches] == [(0, 0, 16), (1, 16, 16)]
    assert choice.num_reused == 32 * CHUNK


def test_cost_policy_joins_a_prefix_that_is_being_computed() -> None:
    conductor = make_conductor(2)
    first = conductor.route(ask("first", 64), now=0.0).prefill
    conductor.fleet.queues.enter(1 - first.slot, "another", 10.0, 1, now=0.0)
    second = conductor.route(ask("second", 64), now=0.01).prefill
    assert (second.slot, second.plan) == (first.slot, Plan.JOIN)
    assert second.ttft <= first.ttft + 0.5


def test_host_memory_is_preferred_to_disk() -> None:
    conductor = make_conductor(2)
    hold(conductor, 0, 32, Tier.DISK)
    hold(conductor, 1, 32, Tier.HOST)
    choice = conductor.route(ask("r", 32), now=0.0).prefill
    assert choice.slot == 1


@pytest.mark.parametrize(("num_asked", "is_kept"), [(None, True), (0, True), (50, False)])
def test_copy_is_kept_if_hotter_than_the_chunk_it_evicts(num_asked, is_kept) -> None:
    conductor = make_conductor(2)
    hold(conductor, 0, 32)
    conductor.fleet.queues.enter(0, "long", 60.0, 1, now=0.0)
    if num_asked is not None:
        conductor.index.stored(1, Tier.HOST, [999])
        for _ in range(num_asked):
            conductor.heat.touch([999], now=0.0)
        conductor.reports.report(1, 999)
    choice = conductor.route(ask("r", 32), now=0.0).prefill
    assert (choice.slot, choice.plan) == (1, Plan.FETCH)
    assert choice.keeps_copy is is_kept


def test_instance_with_a_hot_cache_is_avoided_for_copies() -> None:
    """If two instances are about equally busy, the prefix is used where it is cached."""
    conductor = make_conductor(2, link_gb_s=1000.0)
    hold(conductor, 0, 32)
    conductor.index.stored(1, Tier.HOST, [999])
    for _ in range(50):
        conductor.heat.touch([999, *range(32)], now=0.0)
    conductor.fleet.queues.enter(0, "a little more", 0.05, 1, now=0.0)
    assert chosen_slot(conductor, 0.0) == 1
    conductor.reports.report(1, 999)
    assert chosen_slot(conductor, 0.0) == 0


def chosen_slot(conductor, now: float) -> int:
    decision = conductor.route(ask("r", 32), now=now)
    conductor.ended("r", now=now)
    return decision.prefill.slot


def test_heat_halves_in_a_half_life() -> None:
    heat = HeatMeter(half_life_s=10.0)
    heat.touch([1], now=0.0)
    heat.touch([1], now=10.0)
    assert heat.of(1, now=10.0) == pytest.approx(1.5)
    assert heat.of(1, now=20.0) == pytest.approx(0.75)
    assert heat.of(2, now=20.0) == 0.0


def test_heat_drops_keys_untouched_for_two_generations() -> None:
    heat = HeatMeter(half_life_s=10.0, max_chunks=2)
    heat.touch([1, 2], now=0.0)
    heat.touch([1, 3], now=10.0)
    assert [heat.of(key, now=10.0) for key in (1, 2, 3)] == pytest.approx([1.5, 0.5, 1.0])
    heat.touch([4], now=20.0)
    assert heat.of(2, now=20.0) == 0.0
    assert heat.of(1, now=20.0) == pytest.approx(0.75)
    heat.touch([4], now=20.0 + 10.0 * 5000)
    assert heat.of(4, now=20.0 + 10.0 * 5000) == pytest.approx(1.0)


def test_load_overlaps_with_the_queue_and_the_layers() -> None:
    assert behind_queue(2.0, 1.0, 1.0, 10) == 3.0
    assert behind_queue(0.0, 2.0, 1.0, 10) == pytest.approx(2.1)


def test_unknown_policy_is_rejected_with_the_known_names() -> None:
    with pytest.raises(ConductorConfigError, match="no policy 'best': there are random"):
        make_conductor(1, policy="best")


def test_empty_fleet_raises_unknown_instance() -> None:
    with pytest.raises(UnknownInstance, match="no prefill instance"):
        make_conductor(0).route(ask("r", 1), now=0.0)


def test_sglang_policy_takes_the_longest_match_unless_queues_differ_widely() -> None:
    conductor = make_conductor(3, policy="sglang")
    hold(conductor, 1, 8)
    assert conductor.route(ask("long match", 10), now=0.0).prefill.slot == 1
    assert conductor.route(ask("half a match", 17), now=0.0).prefill.slot != 1
    for number in range(40):
        conductor.fleet.queues.enter(1, f"q{number}", 1.0, 10, now=0.0)
    assert conductor.route(ask("too far apart", 10), now=0.0).prefill.slot != 1


@pytest.mark.parametrize("policy", ["cost", "mooncake"])
@pytest.mark.parametrize(
    ("sends", "fetches", "plan"),
    [
        (True, True, Plan.FETCH),
        (False, True, Plan.RECOMPUTE),
        (True, False, Plan.RECOMPUTE),
    ],
)
def test_prefix_is_fetched_only_between_capable_instances(
    policy: str, sends: bool, fetches: bool, plan: Plan
) -> None:
    conductor = make_conductor(2, policy=policy)
    hold(conductor, 0, 40)
    conductor.fleet.queues.enter(0, "before", 60.0, 1, now=0.0)
    conductor.fleet.share_prefixes(0, sends=sends, fetches=True)
    conductor.fleet.share_prefixes(1, sends=True, fetches=fetches)
    choice = conductor.route(ask("r", 40), 0.0).prefill
    assert (choice.slot, choice.plan) == (1, plan)
    assert math.isfinite(choice.ttft)


def test_prefix_is_fetched_from_a_decode_instance_that_can_send() -> None:
    conductor = make_conductor(1, policy="cost")
    hold(conductor, 1, 40)
    assert conductor.route(ask("r", 40), 0.0).prefill.plan is Plan.RECOMPUTE
    conductor.ended("r", 0.0)
    conductor.fleet.share_prefixes(1, sends=True, fetches=True)
    choice = conductor.route(ask("r", 40), 0.0).prefill
    assert choice.plan is Plan.FETCH
    assert [fetch.source for fetch in choice.fetches] == [1]


def test_reused_slot_has_default_sharing() -> None:
    conductor = make_conductor(2, policy="cost")
    conductor.fleet.share_prefixes(1, sends=False, fetches=False)
    conductor.remove(1, 0.0)
    conductor.fleet.add(InstanceSpec("new", Role.PREFILL, LATENCY))
    assert conductor.fleet.sender_mask == 0b11
    assert conductor.fleet.fetches.all()
