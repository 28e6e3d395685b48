"""Routing policies, checked on plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, strategies as st

from mooncake_proxy.routing.policies import POLICIES, TOKENS_PER_RUNNING, RoutingHint, load


@dataclass(frozen=True)
class Stub:
    """Plain data with the attributes that a policy may read."""

    name: str
    total_running: int = 0
    total_prompt_tokens: int = 0
    relative_speed: float = 1.0


IDLE = [Stub("a"), Stub("b"), Stub("c")]
LOADS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10_000)), min_size=1, max_size=8).map(
    lambda rows: [Stub(f"i{k}", *row) for k, row in enumerate(rows)]
)


NO_HINT = RoutingHint()


def picks(policy: str, candidates: list[Stub], hint: RoutingHint = NO_HINT) -> Counter[str]:
    rng = Random(7)
    return Counter(POLICIES[policy](candidates, hint, rng).name for _ in range(300))


@pytest.mark.parametrize("policy", ["least-loaded", "power-of-two", "prefix", "random", "session"])
def test_equal_candidates_are_chosen_at_random(policy: str) -> None:
    counts = picks(policy, IDLE)
    assert set(counts) == {"a", "b", "c"}
    assert min(counts.values()) > 60


def test_round_robin_takes_turns() -> None:
    names = [POLICIES["round-robin"](IDLE, RoutingHint(turn=k), Random(0)).name for k in range(6)]
    assert names == ["a", "b", "c", "a", "b", "c"]


@given(LOADS, st.integers(0, 2**32))
def test_least_loaded_chooses_least_loaded(candidates: list[Stub], seed: int) -> None:
    chosen = POLICIES["least-loaded"](candidates, RoutingHint(), Random(seed))
    assert load(chosen) == min(load(candidate) for candidate in candidates)


@given(LOADS, st.integers(0, 2**32))
def test_power_of_two_never_chooses_the_worst(candidates: list[Stub], seed: int) -> None:
    chosen = POLICIES["power-of-two"](candidates, RoutingHint(), Random(seed))
    worst = max(load(candidate) for candidate in candidates)
    is_alone = sum(load(candidate) == worst for candidate in candidates) == 1
    assert len(candidates) == 1 or not is_alone or load(chosen) < worst


def test_load_counts_tokens_and_requests_not_bytes() -> None:
    assert load(Stub("a", 2, 300)) == 300 + 2 * TOKENS_PER_RUNNING


def test_cached_prefix_counts_as_saved_tokens() -> None:
    hint = RoutingHint(prompt_tokens=1000, cached_tokens={"a": 800})
    assert set(picks("prefix", [Stub("a", 0, 700), Stub("b")], hint)) == {"a"}
    assert set(picks("prefix", [Stub("a", 0, 900), Stub("b")], hint)) == {"b"}


def test_hit_is_capped_at_prompt_length() -> None:
    hint = RoutingHint(prompt_tokens=10, cached_tokens={"a": 4000})
    assert set(picks("prefix", [Stub("a", 0, 11), Stub("b")], hint)) == {"b"}


@given(st.text(min_size=1))
def test_session_stays_when_other_instance_is_removed(session: str) -> None:
    hint = RoutingHint(session=session)
    home = POLICIES["session"](IDLE, hint, Random(0)).name
    left = [candidate for candidate in IDLE if candidate.name == home]
    for other in IDLE:
        if other.name != home:
            assert POLICIES["session"]([*left, other], hint, Random(1)).name == home


def test_overloaded_instance_loses_its_session() -> None:
    hint = RoutingHint(session="s")
    home = POLICIES["session"](IDLE, hint, Random(0)).name
    busy = [Stub(c.name, 500 if c.name == home else 0) for c in IDLE]
    assert home not in picks("session", busy, hint)


@pytest.mark.parametrize("policy", ["least-loaded", "power-of-two", "prefix"])
def test_idle_slow_device_is_used_once_fast_one_takes_longer(policy: str) -> None:
    hint = RoutingHint(prompt_tokens=1000)
    gpu = Stub("gpu", total_prompt_tokens=40_000, relative_speed=3.0)
    cpu = Stub("cpu", relative_speed=0.05)
    assert picks(policy, [gpu, cpu], hint) == {"gpu": 300}
    busy = Stub("gpu", total_prompt_tokens=80_000, relative_speed=3.0)
    assert picks(policy, [busy, cpu], hint) == {"cpu": 300}


def test_short_prompts_are_routed_by_speed() -> None:
    gpu, cpu = Stub("gpu", relative_speed=3.0), Stub("cpu", relative_speed=0.05)
    assert picks("least-loaded", [gpu, cpu]) == {"gpu": 300}
