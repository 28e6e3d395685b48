"""The policy hit-density: what it learns from uses, what it protects, and what it remembers."""

import random

import pytest

from mooncake_kv.store.chunk_store import Chunk
from mooncake_kv.store.eviction import make_policy
from mooncake_kv.store.hit_density import (
    ESTIMATE_INTERVAL,
    GHOSTS_PER_CHUNK,
    NUM_AGE_GROUPS,
    SHARED_PREFIX_USES,
    HitDensity,
    ReuseStatistics,
    UseClass,
    age_group,
    hit_densities,
)
from mooncake_kv.store.trace_replay import replay


def sequence(name, length, parent=None, first=0):
    """The chunks of a sequence, from the one at position ``first`` on."""
    chunks = []
    for position in range(first, first + length):
        chunks.append(Chunk(f"{name} {position}".encode(), parent, position, 100, 16))
        parent = chunks[-1].key
    return chunks


def keys(chunks):
    return [chunk.key for chunk in chunks]


def add(policy, chunks):
    for chunk in chunks:
        policy.add(chunk)


def conversations_beside_documents(num_requests):
    """Short conversations that go on, and long documents that nobody asks for again."""
    draw, going_on, requests = random.Random(1), [], []
    for number in range(num_requests):
        if number % 4 == 0:
            requests.append(sequence(f"document {number}", 40))
            continue
        if len(going_on) < 40:
            going_on.append(sequence(f"conversation {number}", 2))
        turn = going_on.pop(draw.randrange(len(going_on)))
        requests.append(turn)
        if len(turn) < 12:
            name = turn[0].key.decode().rpartition(" ")[0]
            going_on.append(turn + sequence(name, 1, turn[-1].key, len(turn)))
    return requests


@pytest.mark.parametrize("capacity", [150, 300, 600])
def test_documents_do_not_evict_conversations(capacity):
    requests = conversations_beside_documents(8000)
    lru, learned = (
        replay(requests, make_policy(name), capacity).hit_rate
        for name in ("tail-first-lru", "hit-density")
    )
    assert learned > 1.3 * lru


def test_uses_without_differences_are_evicted_as_by_lru():
    draw = random.Random(2)
    documents = [sequence(f"{number}", 5) for number in range(100)]
    requests = [documents[draw.randrange(100)] for _ in range(5000)]
    lru, learned = (
        replay(requests, make_policy(name), 250).hit_rate
        for name in ("tail-first-lru", "hit-density")
    )
    assert learned > 0.98 * lru


def test_traffic_that_changes_is_learned_anew():
    """Documents are asked for again and again, and then no longer."""
    asked = [sequence(f"asked {number % 5}", 40) for number in range(1500)]
    requests = [*asked, *conversations_beside_documents(8000)]
    lru, learned = (
        replay(requests, make_policy(name), 300).num_hits
        for name in ("tail-first-lru", "hit-density")
    )
    assert learned > lru


def test_last_chunk_of_a_use_is_evicted_first():
    policy = HitDensity()
    chunks = sequence("a", 4)
    add(policy, chunks)
    assert list(policy.victims()) == keys(reversed(chunks))


def test_shared_prefix_stays_while_a_branch_needs_it():
    policy = HitDensity()
    prefix = sequence("prefix", 2)
    branch = sequence("branch", 2, prefix[-1].key, 2)
    add(policy, [*prefix, *branch])
    add(policy, sequence("other", 1))
    policy.touch(keys(prefix))  # a use of its own, without the branch's chunks
    prefix_class = policy._uses[prefix[0].key].use_class
    policy._statistics.note(prefix_class, 1000, 100.0, is_hit=False)  # it would go first
    policy._statistics.estimate(policy._watched(), kept=1.0)
    order = list(policy.victims())
    assert order.index(branch[0].key) < order.index(prefix[1].key) < order.index(prefix[0].key)
    for key in keys(reversed(branch)):
        policy.remove(key)
    assert list(policy.victims()) == [*keys(reversed(prefix)), b"other 0"]


def test_needed_uses_are_not_passed_over_at_each_eviction(monkeypatch):
    policy = HitDensity()
    for number in range(50):
        chunks = sequence(f"{number}", 3)
        add(policy, [*chunks, *sequence(f"between {number}", 1)])
        policy.touch(keys(chunks[:1]))
    [prefixes] = {use.use_class for use in policy._uses.values() if use.history}
    policy._statistics.note(prefixes, 1000, 100.0, is_hit=False)  # so that they would go first
    policy._statistics.estimate(policy._watched(), kept=1.0)
    examined, is_needed = [], policy._is_needed
    monkeypatch.setattr(
        policy, "_is_needed", lambda key, passed: examined.append(key) or is_needed(key, passed)
    )
    for _ in range(50):
        policy.remove(next(policy.victims()))
    assert len(examined) < 50 + 2 * 50


def test_chunk_that_is_added_late_continues_its_use():
    policy = HitDensity()
    first, other = sequence("first", 2), sequence("other", 1)
    add(policy, [*first, *other])
    add(policy, sequence("first", 1, first[-1].key, 2))
    assert list(policy.victims()) == [b"other 0", b"first 2", b"first 1", b"first 0"]


def test_use_of_the_end_is_a_use_of_what_precedes_it():
    policy = HitDensity()
    first, other = sequence("first", 3), sequence("other", 1)
    add(policy, [*first, *other])
    policy.touch(keys(first[1:]))
    assert list(policy.victims()) == [b"other 0", b"first 2", b"first 1", b"first 0"]


def test_evicted_chunks_are_remembered_within_bounds():
    policy = HitDensity()
    for number in range(20 * ESTIMATE_INTERVAL // 10):
        add(policy, sequence(f"{number}", 10))
        while len(list(policy._parents)) > 50:
            policy.remove(next(policy.victims()))
    assert 50 <= len(policy._ghosts) <= GHOSTS_PER_CHUNK * 51
    assert len(policy._uses) == len(policy._parents) + len(policy._ghosts)
    assert set(policy._num_uses) == set(policy._uses)
    assert len(policy._uses_of_ghosts) <= len(policy._ghosts)
    assert set(policy._num_children) <= set(policy._parents)


def test_ages_are_grouped_by_powers_of_two():
    assert [age_group(age) for age in (0, 1, 2, 3, 6, 7)] == [0, 1, 1, 2, 2, 3]
    assert age_group(1 << 60) == NUM_AGE_GROUPS - 1


def test_density_is_hits_per_time_spent_waiting():
    hits, ends = [0.0] * NUM_AGE_GROUPS, [0.0] * NUM_AGE_GROUPS
    ends[0] = hits[0] = 8.0  # within one unit of time, half of it on average
    ends[3] = 2.0  # gave up in the middle of group 3, which is 8 long
    densities = hit_densities(hits, ends)
    assert densities[0] == pytest.approx(8 / (2 + 8 / 2))
    assert densities[1:] == [0.0] * (NUM_AGE_GROUPS - 1)


def test_a_use_is_worth_the_hits_that_come_after_a_pause():
    hits, ends = [0.0] * NUM_AGE_GROUPS, [0.0] * NUM_AGE_GROUPS
    ends[5] = hits[5] = 10.0
    densities = hit_densities(hits, ends)
    assert densities[0] == pytest.approx(10 / (10 * 31 + 10 * 16))
    assert densities[0] < densities[4] < densities[5]
    assert densities[6] == 0.0


def test_uses_that_have_not_ended_count_as_time_without_hits():
    seldom, often = UseClass(5, 0), UseClass(1, 1)
    statistics = ReuseStatistics()
    for _ in range(100):
        for use_class in (seldom, often):
            statistics.note(use_class, 100, 1.0, is_hit=True)
    statistics.estimate([(seldom, 5000, 400.0)], kept=1.0)
    assert statistics.density(seldom, 100) < statistics.density(often, 100) / 5


def test_density_falls_between_groups_without_steps():
    use_class = UseClass(1, 0)
    statistics = ReuseStatistics()
    for age in range(1, 2000, 7):
        statistics.note(use_class, age, 1.0, is_hit=age < 600)
    statistics.estimate([], kept=1.0)
    densities = [statistics.density(use_class, age) for age in range(511, 1023)]
    assert densities == sorted(densities, reverse=True)
    assert len(set(densities)) == len(densities)


def test_chunks_that_are_stored_again_do_not_look_like_a_shared_prefix():
    policy = HitDensity()
    chunks = sequence("a", 50)
    add(policy, chunks)
    for key in keys(reversed(chunks[10:])):
        policy.remove(key)
    add(policy, chunks[10:])
    assert policy._uses[chunks[-1].key].history == 1


@pytest.mark.parametrize(("num_uses", "history"), [(3, 1), (SHARED_PREFIX_USES, 2)])
def test_requests_that_overlap_follow_the_prefix_that_they_share(num_uses, history):
    policy = HitDensity()
    prefix = sequence("prefix", 2)
    add(policy, prefix)
    for number in range(1, num_uses):
        add(policy, sequence(f"between {number}", 1))
        policy.touch(keys(prefix))
    add(policy, sequence("before", 1))
    first, second = (sequence(name, 2, prefix[-1].key, 2) for name in ("first", "second"))
    policy.touch(keys(prefix))
    policy.touch(keys(prefix))  # both start before either has computed a chunk
    for pair in zip(first, second, strict=True):
        add(policy, pair)
    assert [policy._uses[chunks[-1].key].history for chunks in (first, second)] == [history] * 2


def test_conversation_whose_end_was_evicted_goes_on():
    policy = HitDensity()
    prefix = sequence("prefix", 2)
    add(policy, prefix)
    for number in range(SHARED_PREFIX_USES):
        policy.touch(keys(prefix))
        add(policy, sequence(f"between {number}", 1))
    turn = sequence("turn", 3, prefix[-1].key, 2)
    add(policy, turn[:2])
    policy.remove(turn[1].key)
    policy.remove(turn[0].key)
    policy.touch(keys(prefix))
    add(policy, turn)
    assert policy._uses[turn[-1].key].history == 1


def test_order_of_chunks_that_others_need_takes_linear_time(monkeypatch):
    policy = HitDensity()
    prefix = sequence("prefix", 400)
    add(policy, [*prefix, *sequence("branch", 2, prefix[-1].key, 400), *sequence("other", 1)])
    policy.touch(keys(prefix))
    policy._statistics.note(policy._uses[prefix[0].key].use_class, 1000, 100.0, is_hit=False)
    policy._statistics.estimate(policy._watched(), kept=1.0)  # the prefix would go first
    examined, is_needed = [], policy._is_needed
    monkeypatch.setattr(
        policy, "_is_needed", lambda key, passed: examined.append(key) or is_needed(key, passed)
    )
    order = list(policy.victims())
    assert order[-400:] == keys(reversed(prefix))
    assert len(examined) < 10 * len(order)
