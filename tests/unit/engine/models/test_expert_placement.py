"""Experts placed by their load: DeepSeek's published example, and what holds for any load."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from mooncake_engine.models.expert_placement import (
    ExpertRanks,
    imbalance,
    pack_evenly,
    place_experts,
    replicate,
)

PUBLISHED = (
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
)
"""Loads of two layers, of the README of deepseek-ai/EPLB: 16 slots, 4 groups, 2 nodes, 8 GPUs."""
HIERARCHICAL = (
    (5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1),
    (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1),
)
"""The placement that it prints."""


@pytest.mark.parametrize(("loads", "slots"), list(zip(PUBLISHED, HIERARCHICAL, strict=True)))
def test_the_published_example_is_placed_as_published(
    loads: list[int], slots: tuple[int, ...]
) -> None:
    assert place_experts(loads, 16, ExpertRanks(ranks=8, nodes=2, groups=4)) == slots


def test_groups_stay_on_a_node_where_they_can_be_divided_over_nodes() -> None:
    over = ExpertRanks(ranks=8, nodes=2, groups=4)
    slots = place_experts(PUBLISHED[0], 16, over)
    nodes = [{expert // 3 for expert in half} for half in (slots[:8], slots[8:])]
    assert [len(groups) for groups in nodes] == [2, 2]
    assert not nodes[0] & nodes[1]


def test_groups_that_nodes_can_not_share_evenly_are_ignored() -> None:
    uneven = place_experts(PUBLISHED[0], 16, ExpertRanks(ranks=8, nodes=2, groups=3))
    assert uneven == place_experts(PUBLISHED[0], 16, ExpertRanks(ranks=8))


def test_a_busy_expert_has_replicas_on_ranks_of_its_own() -> None:
    slots = place_experts([90, 5, 5, 0], 8, ExpertRanks(ranks=4))
    assert Counter(slots)[0] == 5
    assert imbalance([90, 5, 5, 0], slots, 4) < imbalance([90, 5, 5, 0], (0, 1, 2, 3), 4)
    assert imbalance([0, 0], (0, 1), 2) == 1.0


def test_packs_have_equal_numbers_and_the_heaviest_lie_apart() -> None:
    assert pack_evenly([1, 9, 8, 2], 2) == [[1, 0], [2, 3]]
    assert pack_evenly([3, 1], 2) == [[0], [1]]
    assert replicate([4, 1], 4) == [0, 1, 0, 0]


@given(st.data())
def test_every_expert_has_a_slot_and_every_rank_as_many(data: st.DataObject) -> None:
    nodes, per_node = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    groups = data.draw(st.integers(1, 4))
    experts = groups * data.draw(st.integers(1, 4))
    loads = data.draw(st.lists(st.integers(0, 100), min_size=experts, max_size=experts))
    ranks = nodes * per_node
    over = ExpertRanks(ranks, nodes, groups)
    # in every node's part there is room for its own experts
    num_slots = ranks * (-(-experts // ranks) + data.draw(st.integers(0, 2)))
    slots = place_experts(loads, num_slots, over)
    assert len(slots) == num_slots
    assert set(slots) == set(range(experts))
    assert imbalance(loads, slots, ranks) >= 1.0 - 1e-9
