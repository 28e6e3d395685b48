"""The chunk index matches prompts against exactly what the instances hold, after any events."""

from __future__ import annotations

import random

from hypothesis import given, settings, strategies as st

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.holder_sets import Tier

KEYS = tuple(range(1, 9))


def leading(held: set[int], keys: tuple[int, ...]) -> int:
    return next((i for i, key in enumerate(keys) if key not in held), len(keys))


def check(index: ChunkIndex, truth: dict[tuple[int, Tier], set[int]], num_slots: int) -> None:
    match = index.match(KEYS, now=0.0)
    for slot in range(num_slots):
        tiers = [truth.get((slot, tier), set()) for tier in Tier]
        assert match.device[slot] == leading(tiers[0], KEYS)
        assert match.host[slot] == leading(tiers[0] | tiers[1], KEYS)
        assert match.local[slot] == leading(set().union(*tiers), KEYS)
        for tier in Tier:
            assert index.num_held(slot, tier) == len(tiers[tier])
        assert index.num_held(slot) == sum(map(len, tiers))
    everywhere = set().union(*truth.values())
    assert match.pool == leading(everywhere, KEYS)
    for slot in range(num_slots):
        own = set().union(*(truth.get((slot, tier), set()) for tier in Tier))
        assert match.held[slot] == len(own & set(KEYS[: match.pool]))


steps = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared", "tier cleared", "collect"]),
        st.integers(0, 2),
        st.sampled_from(Tier),
        st.lists(st.sampled_from(KEYS), max_size=8),
    ),
    max_size=40,
)


@given(steps)
@settings(deadline=None, max_examples=300)
def test_index_equals_what_the_instances_hold(done) -> None:
    index, truth = ChunkIndex(3), {}
    for step, slot, tier, keys in done:
        if step == "stored":
            index.stored(slot, tier, keys)
            truth.setdefault((slot, tier), set()).update(keys)
        elif step == "removed":
            index.removed(slot, tier, keys)
            truth.setdefault((slot, tier), set()).difference_update(keys)
        elif step == "cleared":
            index.cleared(slot)
            truth = {where: held for where, held in truth.items() if where[0] != slot}
        elif step == "tier cleared":
            index.cleared(slot, tier)
            truth.pop((slot, tier), None)
        else:
            index.collect(256)
        check(index, truth, 3)
    index.collect(256)
    assert len(index) == len(set().union(*truth.values()) if truth else ())


def test_holder_sets_are_shared_and_freed() -> None:
    index = ChunkIndex(8)
    for slot in range(8):
        index.stored(slot, Tier.HOST, range(1000))
    assert len(index._sets) == 1
    assert index.num_copies(7) == 8
    for slot in range(8):
        index.removed(slot, Tier.HOST, range(1000))
    assert (len(index), len(index._sets)) == (0, 0)


def test_prediction_counts_until_it_expires_or_is_retracted() -> None:
    index = ChunkIndex(2)
    index.stored(0, Tier.DEVICE, [1, 2])
    index.predict(0, [3], ready_at=5.0, expires_at=10.0)
    last = index.predict(0, [4], ready_at=5.0, expires_at=10.0)
    match = index.match([1, 2, 3, 4, 5], now=1.0)
    assert (match.local[0], match.predicted[0], match.ready_at[0]) == (2, 4, 5.0)
    assert match.predicted[1] == 0
    index.retract(last)
    index.retract(last)
    assert index.match([1, 2, 3, 4, 5], now=1.0).predicted[0] == 3
    assert index.match([1, 2, 3, 4, 5], now=10.0).predicted[0] == 2
    assert not any(index._predictions._by_slot)
    assert not index._predictions._masks


def test_stored_chunk_confirms_its_prediction() -> None:
    index = ChunkIndex(2)
    predictions = [index.predict(slot, [1, 2], ready_at=5.0, expires_at=10.0) for slot in (0, 1)]
    index.stored(0, Tier.DEVICE, [1])
    assert not index.match([1], now=1.0).ready_at[0]
    assert index.match([1], now=1.0).ready_at[1] == 5.0
    for each in predictions:
        index.retract(each)
    assert not index._predictions._masks


def test_retracting_a_request_keeps_predictions_of_other_requests() -> None:
    """Two requests compute one prefix on one instance; the first is cancelled."""
    index = ChunkIndex(1)
    first = index.predict(0, [1, 2, 3], ready_at=5.0, expires_at=99.0)
    second = index.predict(0, [1, 2, 4], ready_at=7.0, expires_at=99.0)
    index.retract(first)
    match = index.match([1, 2, 4], now=1.0)
    assert (match.predicted[0], match.ready_at[0]) == (3, 7.0)
    assert index.match([1, 2, 3], now=1.0).predicted[0] == 2
    index.retract(second)
    assert not index._predictions._masks
    assert not any(index._predictions._by_slot)


def test_later_prediction_extends_an_earlier_one_of_the_same_chunk() -> None:
    index = ChunkIndex(1)
    index.predict(0, [1], ready_at=1.0, expires_at=2.0)
    index.predict(0, [1], ready_at=4.0, expires_at=6.0)
    assert index.match([1], now=3.0).predicted[0] == 1
    assert index.match([1], now=6.0).predicted[0] == 0


def test_chunks_of_an_unhealthy_instance_are_only_hints() -> None:
    index = ChunkIndex(2)
    index.stored(0, Tier.DEVICE, [1, 2, 3])
    index.stored(1, Tier.DEVICE, [1])
    index.set_healthy(0, False)
    match = index.match([1, 2, 3], now=0.0)
    assert (match.local[0], match.hinted[0], match.pool) == (0, 3, 1)
    index.set_healthy(0, True)
    assert index.match([1, 2, 3], now=0.0).local[0] == 3


def test_match_covers_a_thousand_instances() -> None:
    rng, index = random.Random(3), ChunkIndex(1000)
    lengths = [rng.randrange(65) for _ in range(1000)]
    for slot, length in enumerate(lengths):
        index.stored(slot, Tier.HOST, range(length))
    match = index.match(range(64), now=0.0)
    assert match.local.tolist() == lengths
    assert match.device.sum() == 0


def test_holders_lists_instances_with_any_chunk() -> None:
    index = ChunkIndex(3)
    index.stored(2, Tier.DISK, [1, 2])
    index.removed(0, Tier.HOST, [1])
    assert index.holders == 0b100
    index.cleared(2)
    assert index.holders == 0


shared_steps = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared", "join", "leave", "renew"]),
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from(Tier),
        st.sets(st.sampled_from(KEYS), max_size=8),
    ),
    max_size=40,
)


@given(shared_steps)
@settings(deadline=None, max_examples=300)
def test_instances_hold_what_the_holders_that_they_share_do(done) -> None:
    """Slot 0 holds chunks itself; all may use two shared holders, which hold others."""
    index = ChunkIndex(3)
    shared = [index.add_shared(), index.add_shared()]
    truth = {(at, tier): set[int]() for at in (0, *shared) for tier in Tier}
    users: dict[int, set[int]] = {at: set() for at in shared}
    for step, slot, which, tier, keys in done:
        holder = shared[which]
        at = holder if slot else 0
        if step in ("stored", "removed"):
            getattr(index, step)(at, tier, keys)
            held = truth[at, tier]
            truth[at, tier] = held | keys if step == "stored" else held - keys
        elif step == "cleared":
            index.cleared(at)
            truth |= {(at, each): set() for each in Tier}
        elif step == "renew":
            index.remove_shared(holder)
            assert index.add_shared() == holder
            users[holder] = set()
            truth |= {(holder, each): set() for each in Tier}
        elif (step == "join") is (slot not in users[holder]):
            getattr(index, f"{step}_shared")(holder, slot)
            (users[holder].add if step == "join" else users[holder].discard)(slot)
        match, everywhere = index.match(KEYS, now=0.0), set[int]()
        for slot in range(3):
            own = [at for at in (0, *shared) if slot == at or slot in users.get(at, ())]
            tiers = [set[int]().union(*(truth[at, each] for at in own)) for each in Tier]
            everywhere |= set[int]().union(*tiers)
            assert match.device[slot] == leading(tiers[0], KEYS)
            assert match.host[slot] == leading(tiers[0] | tiers[1], KEYS)
            assert match.local[slot] == leading(set().union(*tiers), KEYS)
            assert index.num_held(slot) == sum(len(truth[at, each]) for at in own for each in Tier)
            if any(map(len, tiers)):
                assert index.holders >> slot & 1
        assert match.pool == leading(everywhere, KEYS)
