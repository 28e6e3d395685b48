"""Which chunk is evicted first: each policy's rule, prefix-closed eviction, and traces against the
optimum."""

import itertools
import json
import random

import pytest
from hypothesis import given, settings, strategies as st

from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.chunk_store import Chunk
from mooncake_kv.store.eviction import (
    POLICIES,
    CostAware,
    TailFirstLRU,
    make_policy,
    recompute_seconds,
)
from mooncake_kv.store.trace_replay import (
    read_trace,
    replay,
    replay_optimum,
    saved_seconds_bound,
)


def chunk(name, parent="", position=0):
    return Chunk(name.encode(), parent.encode() or None, position, 100, 16)


def order(policy):
    return b" ".join(policy.victims()).decode()


def filled(name):
    """A sequence a, b, c and two single-chunk sequences x and y; then a and b are used, and x."""
    policy = POLICIES[name]()
    for item in (chunk("a"), chunk("b", "a", 1), chunk("c", "b", 2), chunk("x"), chunk("y")):
        policy.add(item)
    policy.touch([b"a", b"b"])
    policy.touch([b"x", b"unknown"])
    return policy


@pytest.mark.parametrize("name", POLICIES)
def test_keys_without_valid_sequence_do_not_affect_other_users(name):
    """Chunks whose parents form a cycle, and batches that name one chunk twice."""
    policy = POLICIES[name]()
    for item in (chunk("a", "b"), chunk("b", "a"), chunk("c", "c"), chunk("d")):
        policy.add(item)
    for batch in ([b"a"], [b"b", b"a", b"b"], [b"c"], [b"d", b"c", b"d", b"a", b"d"]):
        policy.touch(batch)
    assert set(policy.victims()) == {b"a", b"b", b"c", b"d"}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("lru", "c y a b x"),
        ("lfu", "c y a b x"),
        ("length-aware", "c b y a x"),
        ("tail-first-lru", "c y b a x"),
        ("cost-aware", "c y b x a"),
        ("hit-density", "c y b a x"),
    ],
)
def test_eviction_order(name, wanted):
    policy = filled(name)
    if name == "cost-aware":
        assert set(order(policy).split()[:2]) == {"c", "y"}
        assert order(policy).split().index("b") < order(policy).split().index("a")
    else:
        assert order(policy) == wanted
    assert order(policy) == order(policy), "a lookup changes nothing"
    policy.remove(b"y")
    policy.remove(b"unknown")
    assert "y" not in order(policy)


def test_chunks_in_use_overtake_chunks_that_are_no_longer_used():
    policy = CostAware(lambda _: 1.0)
    policy.add(chunk("old"))
    policy.touch([b"old"] * 5)
    for number in range(20):
        policy.add(chunk(f"n{number}"))
        policy.touch([b"n%d" % number])
        victim = next(policy.victims())
        policy.remove(victim)
        if victim == b"old":
            return
    raise AssertionError("a chunk of the past stayed for ever")


def test_unknown_policy_is_rejected():
    with pytest.raises(KVConfigError, match="'fifo' is not known; known are"):
        make_policy("fifo")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from(["tail-first-lru", "cost-aware", "hit-density"]))
def test_no_chunk_outlives_its_parent(seed, name):
    draw, policy, present = random.Random(seed), POLICIES[name](), {}
    for _ in range(60):
        path = "".join(draw.choice("ab") for _ in range(draw.randrange(1, 7)))
        chunks = [chunk(path[: i + 1], path[:i], i) for i in range(len(path))]
        policy.touch([c.key for c in chunks if c.key in present])
        for each in chunks:
            if each.key not in present:
                policy.add(each)
                present[each.key] = each
        while len(present) > 20:
            victim = next(policy.victims())
            policy.remove(victim)
            del present[victim]
            assert all(c.parent != victim for c in present.values())
    assert sorted(policy.victims()) == sorted(present)


def trace(path, requests):
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in requests))
    return read_trace(path)


REQUESTS = [[1, 2, 3], [4], [1, 2, 5], [4], [1, 2, 3], [6], [4], [1, 7]]


def test_trace_counts_blocks_before_the_first_miss(tmp_path):
    requests = trace(tmp_path / "trace.jsonl", REQUESTS)
    unlimited = replay(requests, make_policy("lru"), float("inf"))
    assert (unlimited.num_blocks, unlimited.num_hits) == (15, 8)
    assert unlimited == replay_optimum(requests, float("inf"))
    assert 0 < unlimited.saved_rate < 1
    assert replay(requests, make_policy("lru"), 0).num_hits == 0


def test_no_policy_hits_more_than_the_optimum(tmp_path):
    requests = trace(tmp_path / "trace.jsonl", REQUESTS)
    for capacity, name in itertools.product((1, 2, 3, 4), POLICIES):
        best = replay_optimum(requests, capacity).num_hits
        assert replay(requests, make_policy(name), capacity).num_hits <= best
        assert best == best_by_trying(REQUESTS, capacity)


def test_no_choice_saves_more_seconds_than_the_bound(tmp_path):
    requests = trace(tmp_path / "trace.jsonl", REQUESTS)
    cost = {n: recompute_seconds(c) for ids, cs in zip(REQUESTS, requests, strict=True)
            for n, c in zip(ids, cs, strict=True)}  # fmt: skip
    for capacity in (1, 2, 3, 4):
        bound = saved_seconds_bound(requests, capacity)
        best = best_by_trying(REQUESTS, capacity, cost)
        assert best <= bound * (1 + 1e-9)
        assert bound <= best * 1.5, "the bound is not trivial"
    everything = replay(requests, make_policy("lru"), float("inf")).saved_seconds
    assert saved_seconds_bound(requests, float("inf")) == pytest.approx(everything)
    assert saved_seconds_bound(requests, 0) == pytest.approx(0.0, abs=0.02)
    assert saved_seconds_bound([], 5) == 0.0


def best_by_trying(requests, capacity, worth=None):
    """The most blocks, or their ``worth``, that any choice of kept blocks can hit."""
    states = {frozenset(): 0}
    for ids in requests:
        following = {}
        for kept, hits in states.items():
            hit_ids = list(itertools.takewhile(kept.__contains__, ids))
            found = len(hit_ids) if worth is None else sum(worth[n] for n in hit_ids)
            candidates = sorted(kept | set(ids))
            for size in range(min(capacity, len(candidates)) + 1):
                for chosen in itertools.combinations(candidates, size):
                    state = frozenset(chosen)
                    following[state] = max(following.get(state, 0), hits + found)
        states = following
    return max(states.values())


@pytest.mark.parametrize("line", ["", "[]", '{"hash_ids": 3}', '{"hash_ids": ["a"]}', "{}"])
def test_invalid_trace_line_is_reported(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(KVConfigError, match="line 2: wanted an object with hash_ids"):
        read_trace(path)


def test_missing_trace_is_reported(tmp_path):
    with pytest.raises(KVConfigError, match="can't be read"):
        read_trace(tmp_path / "absent.jsonl")


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=12))
def test_touching_a_batch_equals_touching_its_chunks(batches):
    policy, order = TailFirstLRU(), [b"%d" % number for number in range(10)]
    for key in order:
        policy.add(Chunk(key, None, 0, 1, 1))
    for batch in batches:
        keys = [b"%d" % number for number in batch]
        policy.touch([*keys, b"unknown"])
        for key in reversed(keys):
            order.remove(key)
            order.append(key)
        assert list(policy.victims()) == order
