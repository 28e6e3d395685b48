"""Modelled nodes are checked against M/D/1 queueing, Little's law, and a step-by-step model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.simulator.engine_models import (
    ChunkCache,
    DecodeNode,
    PrefillJob,
    PrefillNode,
)

LATENCY = LatencyModel(0.0, 1e-3, 0.0, 0.02, 1e-3, 1e-6)


def prefill_node(capacity: int = 10) -> PrefillNode:
    cache = ChunkCache(capacity)
    return PrefillNode(LATENCY, cache, chunk_tokens=100, chunk_load_s=0.0, num_layers=10)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_prefill_queueing_time_matches_m_d_1(load: float) -> None:
    """Pollaczek-Khinchine: the mean wait is load / (2 (1 - load)) service times, within 1 %."""
    node, rng, now, waited, num = prefill_node(), random.Random(5), 0.0, 0.0, 400_000
    free_at = busy = 0.0
    for number in range(num):
        now += rng.expovariate(load)
        if node.running is not None and free_at <= now:
            node.finish()
        node.queue.append(PrefillJob(str(number), 1000, ()))
        begin = max(now, free_at)
        if node.running is not None:
            node.finish()
        job = node.start_next(begin)
        assert job is not None
        waited += begin - now
        free_at = job.ends_at
        busy += job.ends_at - begin
    assert waited / num == pytest.approx(load / (2 * (1 - load)), rel=0.01)
    assert busy == pytest.approx(num)


def test_decode_node_obeys_little_s_law() -> None:
    """The mean number of running sequences is the arrival rate times their mean residence time."""
    node, rng, now, area, last, stays = (
        DecodeNode(LATENCY, 64, 10**7),
        random.Random(2),
        0.0,
        0,
        0,
        [],
    )
    for number in range(4000):
        now += rng.expovariate(2.0)
        while (when := node.next_event()) is not None and when <= now:
            area += (when - last) * node.num_running
            last = when
            stays += [done.ended_at - done.joined_at for done in node.advance(when)]
        area += (now - last) * node.num_running
        last = now
        node.add(str(number), 100, rng.randrange(1, 200))
        stays += [done.ended_at - done.joined_at for done in node.advance(now)]
    assert area / now == pytest.approx(sum(stays) / now, rel=0.01)


@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(1, 500), st.integers(1, 60)),
        min_size=1,
        max_size=12,
        unique_by=lambda arrival: arrival[0],
    ),
    st.integers(1, 4),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=150)
def test_closed_form_decode_node_equals_the_stepped_model(
    arrivals, max_batch: int, join_steps: int
) -> None:
    arrivals = [(ms * 1.000137e-3, *sizes) for ms, *sizes in sorted(arrivals)]
    found = simulate_decode(arrivals, max_batch, join_steps)
    wanted = step_by_step(arrivals, max_batch, join_steps)
    assert found.keys() == wanted.keys()
    for name, (ended_at, mean, tail) in wanted.items():
        assert found[name].ended_at == pytest.approx(ended_at, abs=1e-6)
        assert found[name].mean_tbt == pytest.approx(mean, rel=1e-6)
        assert found[name].tail_tbt == pytest.approx(tail, rel=0.05)


@pytest.mark.parametrize("per_context", [1e-9, 1e-11, 1e-13])
def test_steps_end_when_context_cost_is_negligible(per_context: float) -> None:
    """Advancing to the time of the next event always completes at least one step."""
    latency = LatencyModel(0.0, 1e-3, 0.0, 0.02, 1e-5, per_context)
    node, now = DecodeNode(latency, 64, 10**7), 0.0
    for number in range(20):
        node.add(str(number), 977, 31 + number)
    node.advance(now)
    while (when := node.next_event()) is not None:
        before = node.num_steps
        node.advance(when)
        assert node.num_steps > before


def simulate_decode(arrivals, max_batch: int, join_steps: int):
    node, done = DecodeNode(LATENCY, max_batch, 10**7, join_steps), []
    pending = list(enumerate(arrivals))
    while pending or node.next_event() is not None:
        when = node.next_event()
        if pending and (when is None or pending[0][1][0] <= when):
            number, (at, tokens, outputs) = pending.pop(0)
            node.add(str(number), tokens, outputs)
            done += node.advance(at)
        else:
            done += node.advance(when)
    return {each.request_id: each for each in done}


def step_by_step(arrivals, max_batch: int, join_steps: int):
    """Simulate every step. A request joins at the beginning of a step, ``join_steps`` steps after
    the first that begins after its arrival, but at once if the node is idle."""
    waiting = [(at, str(n), tokens, outputs) for n, (at, tokens, outputs) in enumerate(arrivals)]
    now, running, done, begins = 0.0, [], {}, []
    while waiting or running:
        is_idle = not running
        if is_idle:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now + 1e-12 and len(running) < max_batch:
            since = sum(1 for begin in begins if begin > waiting[0][0])
            if not is_idle and since < join_steps:
                break
            _, name, tokens, outputs = waiting.pop(0)
            running.append([name, tokens, outputs, []])
        begins.append(now)
        seconds = LATENCY.step_seconds(len(running), sum(each[1] for each in running))
        now += seconds
        for each in running:
            each[1] += 1
            each[3].append(seconds)
        for name, _, outputs, gaps in [each for each in running if len(each[3]) == each[2]]:
            longest = sorted(gaps)[-max(1, -(-outputs // 10)) :]
            done[name] = (now, sum(gaps) / outputs, sum(longest) / len(longest))
        running = [each for each in running if len(each[3]) < each[2]]
    return done


def test_cache_evicts_chain_tails_first() -> None:
    cache = ChunkCache(4)
    assert cache.insert((1, 2, 3)) == ([3, 2, 1], [])
    assert cache.insert((9, 8)) == ([8, 9], [3])
    assert (cache.prefix((1, 2, 3)), cache.victim) == (2, 2)
    assert ChunkCache(4).victim is None


def test_prefill_reuses_chunks_cached_when_it_starts() -> None:
    node = prefill_node()
    node.queue.extend(PrefillJob(name, 401, (1, 2, 3, 4)) for name in "ab")
    first = node.start_next(0.0)
    assert node.start_next(0.1) is None
    assert (first.num_reused, first.ends_at) == (0, pytest.approx(0.401))
    node.finish()
    second = node.start_next(0.401)
    assert (second.num_reused, second.compute_s) == (400, pytest.approx(0.001))


def test_fetched_prefix_without_a_kept_copy_caches_only_computed_chunks() -> None:
    node = prefill_node()
    job = PrefillJob("a", 401, (1, 2, 3, 4), num_fetched=200, loaded_at=1.0, keeps_copy=False)
    node.queue.append(job)
    assert node.start_next(0.0).ends_at == pytest.approx(1.0 + 0.0201)
    assert node.finish()[1] == [4, 3]
