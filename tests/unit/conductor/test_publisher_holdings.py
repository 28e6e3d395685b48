"""Data-parallel ranks of an instance publish separately: the index has their union."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.publisher_holdings import PublisherHoldings

NUM_RANKS, SLOT = 3, 2
changes = st.tuples(
    st.integers(0, NUM_RANKS - 1),
    st.sampled_from(list(Tier)),
    st.sampled_from(["stored", "removed", "cleared"]),
    st.sets(st.integers(1, 12), max_size=6),
)


@given(st.lists(changes, max_size=40))
@settings(deadline=None)
def test_instance_holds_a_chunk_while_any_rank_does(done) -> None:
    index = ChunkIndex(4)
    holdings = PublisherHoldings(index, NUM_RANKS)
    held = {(rank, tier): set() for rank in range(NUM_RANKS) for tier in Tier}
    for rank, tier, change, keys in done:
        one = holdings.ranks[rank]
        if change == "cleared":
            one.cleared(SLOT)
            held |= {(rank, each): set() for each in Tier}
        else:
            getattr(one, change)(SLOT, tier, keys)
            held[rank, tier] = (
                held[rank, tier] | keys if change == "stored" else held[rank, tier] - keys
            )
    for tier in Tier:
        union = set().union(*(held[rank, tier] for rank in range(NUM_RANKS)))
        assert index.num_held(SLOT, tier) == len(union)
        for rank in range(NUM_RANKS):
            assert set(holdings.held_by(rank, tier)) == held[rank, tier]
            assert len(holdings.held_by(rank, tier)) == len(held[rank, tier])


def test_leading_chunks_are_counted_per_rank() -> None:
    holdings = PublisherHoldings(ChunkIndex(4), NUM_RANKS)
    first, second, third = holdings.ranks
    first.stored(SLOT, Tier.DEVICE, [5, 6])
    second.stored(SLOT, Tier.DEVICE, [5, 6, 7, 9])
    third.stored(SLOT, Tier.DEVICE, [6, 7, 8])
    second.stored(SLOT, Tier.HOST, [8])
    assert holdings.leading_chunks([5, 6, 7, 8, 9]) == [2, 3, 0]
    assert holdings.leading_chunks([]) == [0, 0, 0]
    second.removed(SLOT, Tier.DEVICE, [6])
    assert holdings.leading_chunks([5, 6, 7]) == [2, 1, 0]


def test_instance_is_healthy_only_if_all_ranks_are() -> None:
    index = ChunkIndex(4)
    first, second, _ = PublisherHoldings(index, NUM_RANKS).ranks
    first.stored(SLOT, Tier.DEVICE, [5])
    for rank, is_healthy in ((first, False), (second, False), (first, True)):
        rank.set_healthy(SLOT, is_healthy)
        assert index.match([5], 0.0).local[SLOT] == 0
    second.set_healthy(SLOT, True)
    assert index.match([5], 0.0).local[SLOT] == 1
