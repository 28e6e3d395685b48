"""Which experts a token goes to: pure functions of its scores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

_TINY = 1e-20
"""Keeps a sum of vanishing weights from dividing by zero."""


class Scoring(str, Enum):
    """How a router's logits become scores."""

    SOFTMAX = "softmax"
    """Over all experts."""
    SIGMOID = "sigmoid"
    """Each expert on its own (DeepSeek-V3)."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How a router chooses.

    Args:
        num_experts: to choose from.
        experts_per_token: chosen.
        scoring: from logits to scores.
        is_normalized: whether the chosen weights are made to add up to one.
        scaling: what weights are multiplied by at the end.
        groups: of consecutive experts, of equal size; 1 for no grouping.
        chosen_groups: those that experts are chosen from.
        group_scorers: best experts of a group whose scores, added up, are the group's.
        has_correction_bias: whether a learnt bias is added to scores for the choice alone.
    """

    num_experts: int
    experts_per_token: int
    scoring: Scoring = Scoring.SOFTMAX
    is_normalized: bool = True
    scaling: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_scorers: int = 1
    has_correction_bias: bool = False


def choose_experts(
    logits: Tensor,  # [tokens, num_experts] float32
    routing: RoutingConfig,
    correction_bias: Tensor | None = None,  # [num_experts] float32
) -> tuple[Tensor, Tensor]:
    """Expert ids (int64) and weights (float32) of every token, ``[tokens, experts_per_token]``.

    Top-k of the softmax as in Mixtral (arXiv 2401.04088); limited to the best groups as in
    DeepSeek-V2 (arXiv 2405.04434); sigmoid with a bias that balances the load without an
    auxiliary loss as in DeepSeek-V3 (arXiv 2412.19437).
    """
    is_softmax = routing.scoring is Scoring.SOFTMAX
    scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
    preference = scores if correction_bias is None else scores + correction_bias
    if routing.groups > 1:
        preference = _within_best_groups(preference, routing)
    ids = preference.topk(routing.experts_per_token, dim=-1).indices
    weights = scores.gather(1, ids)
    if routing.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return ids, weights * routing.scaling


def _within_best_groups(preference: Tensor, routing: RoutingConfig) -> Tensor:
    """The preference with experts outside the chosen groups at minus infinity."""
    tokens, experts = preference.shape
    grouped = preference.view(tokens, routing.groups, experts // routing.groups)
    group_scores = grouped.topk(routing.group_scorers, dim=-1).values.sum(-1)
    chosen = group_scores.topk(routing.chosen_groups, dim=-1).indices
    outside = group_scores.new_ones(group_scores.shape).scatter(1, chosen, 0.0).bool()
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).view_as(preference)
