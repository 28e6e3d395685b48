"""Dispatch of tokens to experts of other ranks and back, over a real group of threads."""

from __future__ import annotations

import pytest
import torch
from support.thread_ranks import CountingGroup, on_ranks
from torch import Tensor

from mooncake_engine.models.expert_parallel import (
    ExpertDispatch,
    ExpertReplicas,
    SharedTokens,
)
from mooncake_engine.models.layers import share_of
from mooncake_engine.models.mlp import ExpertCounts

HIDDEN, CHOSEN = 16, 3


def routed(rank: int, tokens: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of a rank, and the expert ids and weights chosen by each."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(tokens, HIDDEN, generator=generator)
    weights, ids = torch.rand(tokens, experts, generator=generator).topk(CHOSEN)
    return rows, ids, weights


def run_experts(rows: Tensor, ids: Tensor, weights: Tensor, held: range) -> Tensor:
    """Apply the held experts, each of which multiplies by its number plus one."""
    mine = (ids >= held.start) & (ids < held.stop)
    return rows * ((ids + 1) * weights * mine).sum(1, keepdim=True)


@pytest.mark.parametrize(("ranks", "ep_size"), [(2, 2), (3, 3), (4, 2)])
@pytest.mark.parametrize("tokens", [(5, 0, 1, 9), (0, 0, 0, 0), (1, 30, 0, 0)])
def test_every_token_gets_the_sum_of_its_experts(
    ranks: int, ep_size: int, tokens: tuple[int, ...]
) -> None:
    experts = 7
    parts = [share_of(experts, part, ep_size) for part in range(ep_size)]
    owners = torch.tensor([part for part, span in enumerate(parts) for _ in range(len(span))])
    sliced = ranks // ep_size

    def run(group: CountingGroup) -> tuple[Tensor, Tensor, list[int], int]:
        rows, ids, weights = routed(group.rank, tokens[group.rank], experts)
        counts = ExpertCounts(experts, range(experts), torch.device("cpu"))
        dispatched = ExpertDispatch(group, owners, ep_size).start(
            rows, ids, weights, counts, counts.of(ids)
        )
        chosen = sum(tokens[:ranks]) * CHOSEN
        assert sum(counts.tokens) == chosen  # of all ranks
        span = parts[group.rank // sliced]
        outputs = run_experts(*dispatched.arrived(), range(span.start, span.stop)) / sliced
        wanted = run_experts(rows, ids, weights, range(experts))
        part_of_rank = torch.arange(ranks) // sliced
        visits = (owners[ids].unsqueeze(-1) == part_of_rank).any(1)
        visits[:, group.rank] = False
        assert counts.num_sent_rows == visits.sum()
        return dispatched.combine(outputs), wanted, group.left, int(visits.sum())

    for found, wanted, left, visits in on_ranks(ranks, run):
        torch.testing.assert_close(found, wanted)
        # one row per other rank with a chosen expert, 8 bytes per choice, none for padding
        assert left[0] == visits * (HIDDEN * 4 + CHOSEN * 8)
        assert visits <= len(found) * min(CHOSEN * sliced, ranks - 1)
        assert len(left) == 2


def test_no_token_is_dropped_if_all_choose_the_same_expert() -> None:
    def run(group: CountingGroup) -> Tensor:
        rows = torch.full((50, HIDDEN), float(group.rank + 1))
        ids, weights = torch.tensor([[3]]).expand(50, 1), torch.ones(50, 1)
        counts = ExpertCounts(4, range(4), torch.device("cpu"))
        dispatched = ExpertDispatch(group, torch.tensor([0, 0, 1, 1]), 2).start(
            rows, ids, weights, counts, counts.of(ids)
        )
        assert counts.tokens == (0, 0, 0, 100)
        arrived = dispatched.arrived()
        assert len(arrived[0]) == (100 if group.rank == 1 else 0)
        return dispatched.combine(run_experts(*arrived, range(2, 4) if group.rank else range(2)))

    for rank, found in enumerate(on_ranks(2, run)):
        assert torch.equal(found, torch.full((50, HIDDEN), 4.0 * (rank + 1)))


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_divided_tokens_are_summed_and_gathered(num_tokens: int) -> None:
    values = torch.arange(num_tokens * 4.0).view(num_tokens, 4)

    def run(group: CountingGroup) -> tuple[Tensor, Tensor, list[int]]:
        tokens = SharedTokens(group)
        own = tokens.reduce_scatter(values * (group.rank + 1))
        return own, tokens.gather(own, num_tokens), group.left

    results = on_ranks(3, run)
    assert torch.equal(torch.cat([own for own, _, _ in results]), values * 6)
    assert all(torch.equal(gathered, values * 6) for _, gathered, _ in results)
    for own, _, (scattered, gathered) in results:
        assert scattered == (num_tokens - len(own)) * 16
        assert gathered == 2 * len(own) * 16


def test_replicas_of_an_expert_are_used_in_turn() -> None:
    replicas = ExpertReplicas((0, 1, 1, 2, 1, 0), 3, torch.device("cpu"))
    ids = torch.tensor([[0, 1], [0, 1], [1, 2], [1, 2], [0, 2]])
    assert replicas.choose(ids).tolist() == [[0, 1], [5, 2], [4, 3], [1, 3], [0, 3]]
    assert ExpertReplicas(range(4), 4, torch.device("cpu")).choose(ids).tolist() == ids.tolist()
