"""Expert routing, checked against its definition, one token and one expert at a time."""

from __future__ import annotations

import math

import pytest
import torch

from mooncake_engine.models.mlp import RoutingConfig, Scoring, choose_experts

CONFIGS = [
    RoutingConfig(8, 2),
    RoutingConfig(8, 8, is_normalized=False),
    RoutingConfig(6, 1, scaling=2.5, is_normalized=False),
    RoutingConfig(12, 3, groups=4, chosen_groups=2, is_normalized=False, scaling=16.0),
    RoutingConfig(
        12, 4, Scoring.SIGMOID, groups=3, chosen_groups=2, group_scorers=2, scaling=2.5,
        has_correction_bias=True,
    ),
]  # fmt: skip


def expected(logits: list[float], bias: list[float], routing: RoutingConfig) -> dict[int, float]:
    """Return the weight of every expert chosen by one token."""
    if routing.scoring is Scoring.SOFTMAX:
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    preference = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(logits) // routing.groups

    def group_score(group: int) -> float:
        members = sorted(preference[group * size : (group + 1) * size], reverse=True)
        return sum(members[: routing.group_scorers])

    groups = sorted(range(routing.groups), key=group_score, reverse=True)[: routing.chosen_groups]
    allowed = [expert for expert in range(len(logits)) if expert // size in groups]
    chosen = sorted(allowed, key=lambda expert: preference[expert], reverse=True)
    chosen = chosen[: routing.experts_per_token]
    total = sum(scores[expert] for expert in chosen) if routing.is_normalized else 1.0
    return {expert: scores[expert] / total * routing.scaling for expert in chosen}


@pytest.mark.parametrize("routing", CONFIGS, ids=lambda routing: f"{routing.experts_per_token}")
def test_every_token_chooses_the_experts_of_the_definition(routing: RoutingConfig) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, routing.num_experts, generator=generator)
    bias = torch.randn(routing.num_experts, generator=generator) * 0.3
    if not routing.has_correction_bias:
        bias.zero_()
    ids, weights = choose_experts(logits, routing, bias if routing.has_correction_bias else None)
    assert weights.dtype is torch.float32
    for row, found in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        wanted = expected(logits[row].tolist(), bias.tolist(), routing)
        assert dict(zip(*found, strict=True)) == pytest.approx(wanted, rel=1e-5)


def test_empty_batch_chooses_no_experts() -> None:
    ids, weights = choose_experts(torch.empty(0, 12), CONFIGS[3])
    assert ids.shape == weights.shape == (0, 3)
