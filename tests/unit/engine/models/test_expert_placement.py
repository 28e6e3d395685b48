"""Placement of experts by load: DeepSeek's published example, and invariants for any load."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from mooncake_engine.models.expert_placement import (
    ExpertRanks,
    imbalance,
    pack_evenly,
    place_experts,
    plan_moves,
    reduce_moves,
    replicate,
)

PUBLISHED = (
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
)
"""Loads of two layers from the README of deepseek-ai/EPLB: 16 slots, 4 groups, 2 nodes, 8 GPUs."""
HIERARCHICAL = (
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
)
"""The placement that the README prints."""


@pytest.mark.parametrize(("loads", "slots"), list(zip(PUBLISHED, HIERARCHICAL, strict=True)))
def test_published_example_has_its_published_placement(
    loads: list[int], slots: tuple[int, ...]
) -> None:
    assert place_experts(loads, 16, ExpertRanks(ranks=8, nodes=2, groups=4)) == slots


def test_groups_stay_on_a_node_if_divisible_over_nodes() -> None:
    over = ExpertRanks(ranks=8, nodes=2, groups=4)
    slots = place_experts(PUBLISHED[0], 16, over)
    nodes = [{expert // 3 for expert in half} for half in (slots[:8], slots[8:])]
    assert [len(groups) for groups in nodes] == [2, 2]
    assert not nodes[0] & nodes[1]


def test_groups_not_divisible_over_nodes_are_ignored() -> None:
    uneven = place_experts(PUBLISHED[0], 16, ExpertRanks(ranks=8, nodes=2, groups=3))
    assert uneven == place_experts(PUBLISHED[0], 16, ExpertRanks(ranks=8))


def test_busy_expert_has_replicas_on_several_ranks() -> None:
    slots = place_experts([90, 5, 5, 0], 8, ExpertRanks(ranks=4))
    assert Counter(slots)[0] == 5
    assert imbalance([90, 5, 5, 0], slots, 4) < imbalance([90, 5, 5, 0], (0, 1, 2, 3), 4)
    assert imbalance([0, 0], (0, 1), 2) == 1.0


def test_packs_have_equal_sizes_with_the_heaviest_items_apart() -> None:
    assert pack_evenly([1, 9, 8, 2], 2) == [[1, 0], [2, 3]]
    assert pack_evenly([3, 1], 2) == [[0], [1]]
    assert replicate([4, 1], 4) == [0, 1, 0, 0]


@given(st.data())
def test_every_expert_has_a_slot_and_ranks_have_equal_counts(data: st.DataObject) -> None:
    nodes, per_node = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    groups = data.draw(st.integers(1, 4))
    experts = groups * data.draw(st.integers(1, 4))
    loads = data.draw(st.lists(st.integers(0, 100), min_size=experts, max_size=experts))
    ranks = nodes * per_node
    over = ExpertRanks(ranks, nodes, groups)
    # every node has enough slots for its own experts
    num_slots = ranks * (-(-experts // ranks) + data.draw(st.integers(0, 2)))
    slots = place_experts(loads, num_slots, over)
    assert len(slots) == num_slots
    assert set(slots) == set(range(experts))
    assert imbalance(loads, slots, ranks) >= 1.0 - 1e-9


placements = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(
        st.just(ranks),
        st.integers(ranks, 12).flatmap(
            lambda experts: st.tuples(
                st.lists(st.integers(0, 99), min_size=experts, max_size=experts),
                st.lists(st.integers(0, 99), min_size=experts, max_size=experts),
            )
        ),
    )
)


@given(placements, st.integers(0, 3))
def test_moves_turn_one_placement_into_another(given_placements, num_more: int) -> None:
    num_ranks, (loads, others) = given_placements
    num_slots = len(loads) + -len(loads) % num_ranks + num_more * num_ranks
    before = place_experts(loads, num_slots, ExpertRanks(num_ranks))
    wanted = place_experts(others, num_slots, ExpertRanks(num_ranks))
    after = reduce_moves(wanted, before, num_ranks)
    size = num_slots // num_ranks
    by_rank = [
        sorted(tuple(sorted(slots[first : first + size])) for first in range(0, num_slots, size))
        for slots in (wanted, after)
    ]
    assert by_rank[0] == by_rank[1], "the packs are equal, possibly on other ranks"
    weights = list(before)
    for move in plan_moves(before, after, num_ranks):
        assert before[move.source] == after[move.target] != before[move.target]
        weights[move.target] = before[move.source]
    assert tuple(weights) == after
    assert reduce_moves(before, before, num_ranks) == before
    assert plan_moves(before, before, num_ranks) == ()


def test_experts_keep_their_slots_if_possible() -> None:
    before = (0, 1, 2, 3, 4, 5)
    assert reduce_moves((5, 4, 3, 1, 0, 2), before, 2) == (0, 1, 2, 3, 4, 5)
    assert reduce_moves((3, 4, 1, 0, 5, 2), before, 2) == (0, 5, 2, 3, 4, 1)
    moves = plan_moves((0, 1, 2, 0, 1, 3), (0, 3, 2, 0, 1, 2), 2)
    assert [(move.source, move.target) for move in moves] == [(5, 1), (2, 5)]
