"""The gated MLP, and the mixture of experts that may replace it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from mooncake_engine.models.layers import (
    ColumnLinear,
    ExpertWeights,
    MoveExperts,
    ParallelContext,
    RowLinear,
    WeightShard,
    linear_sources,
)
from mooncake_hal.fused_experts import FusedExperts

_TINY = 1e-20
"""Added to the sum of weights, so that a sum of zero does not divide."""


class Scoring(str, Enum):
    """How a router turns logits into scores."""

    SOFTMAX = "softmax"
    """Softmax over all experts."""
    SIGMOID = "sigmoid"
    """Sigmoid of each expert's logit (DeepSeek-V3)."""


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """How a router chooses experts.

    Args:
        num_experts: number of routed experts.
        experts_per_token: number of experts chosen per token.
        scoring: how logits become scores.
        is_normalized: whether the weights of the chosen experts are normalised to sum to one.
        scaling: factor that the weights are multiplied by in the end.
        groups: number of groups of consecutive experts, of equal size; 1 for no grouping.
        chosen_groups: number of groups that experts are chosen from.
        group_scorers: number of best experts in a group whose scores are summed to the group's.
        has_correction_bias: whether a learnt bias is added to the scores, for the choice only.
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
    """The preference, with experts outside the best groups set to minus infinity."""
    tokens, experts = preference.shape
    grouped = preference.view(tokens, routing.groups, experts // routing.groups)
    group_scores = grouped.topk(routing.group_scorers, dim=-1).values.sum(-1)
    chosen = group_scores.topk(routing.chosen_groups, dim=-1).indices
    outside = group_scores.new_ones(group_scores.shape).scatter(1, chosen, 0.0).bool()
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).view_as(preference)


class MlpNames(NamedTuple):
    """The checkpoint's names of the linears; ``{}`` stands for the layer's number."""

    gate: str = "model.layers.{}.mlp.gate_proj"
    up: str = "model.layers.{}.mlp.up_proj"
    down: str = "model.layers.{}.mlp.down_proj"

    def of(self, *numbers: int) -> MlpNames:
        """The names with the number of a layer, or of a layer and an expert, filled in."""
        return MlpNames(*(name.format(*numbers) for name in self))


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``, with the inner dimension split over ranks.

    Args:
        parallel: the parallel context of the rank.
        names: names of the linears, with all numbers filled in.
        shape: hidden and inner size, on all ranks together.
        has_bias: whether all three linears have a bias.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        names: MlpNames,
        shape: tuple[int, int],
        *,
        has_bias: bool = False,
    ) -> None:
        hidden, inner = shape
        self._ops = parallel.ops
        share = parallel.share(inner)
        sources = linear_sources((names.gate, names.up), (inner, inner), (share, share))
        self._gate_up = ColumnLinear(parallel, sources, hidden, has_bias=has_bias)
        self._down = RowLinear(parallel, names.down, share, shape, has_bias=has_bias)

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        yield from self._gate_up.weight_shards()
        yield from self._down.weight_shards()

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        self._gate_up.process_weights_after_loading()
        self._down.process_weights_after_loading()

    def partial(self, x: Tensor) -> Tensor:
        """This rank's partial sum of the output, before the all-reduce."""
        return self._down.partial(self._ops.silu_mul(self._gate_up(x)))

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, hidden] to [tokens, hidden]."""
        return self._down(self._ops.silu_mul(self._gate_up(x)))


class Router:
    """Chooses experts for tokens. Replicated on every rank, in float32 whatever the model's dtype.

    Args:
        parallel: the parallel context of the rank.
        name: prefix of ``.weight`` in the checkpoint.
        hidden_size: width of its input.
        routing: how it chooses.
    """

    def __init__(
        self, parallel: ParallelContext, name: str, hidden_size: int, routing: RoutingConfig
    ) -> None:
        self._ops = parallel.ops
        self._name = name
        self._routing = routing
        float32, experts = torch.float32, routing.num_experts
        self._weight = parallel.empty(experts, hidden_size, dtype=float32)
        has_bias = routing.has_correction_bias
        self._bias = parallel.empty(experts, dtype=float32) if has_bias else None

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        shape = tuple(self._weight.shape)
        yield WeightShard(f"{self._name}.weight", self._weight, shape, (0, 0))
        if self._bias is not None:
            name = f"{self._name}.e_score_correction_bias"
            yield WeightShard(name, self._bias, shape[:1], (0,))

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weight to the backend's layout."""
        self._weight = self._ops.pack_weight(self._weight)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map [tokens, hidden] to expert ids and weights, see ``choose_experts``."""
        logits = self._ops.linear(x.float(), self._weight, None)
        return choose_experts(logits, self._routing, self._bias)


class DenseExperts:
    """``ExpertWeights`` in the model's dtype: gated MLPs, some of which run for each token.

    Args:
        parallel: the parallel context of the rank.
        names: names of the linears of this rank's experts, in order.
        shape: hidden and inner size, on all ranks together.
    """

    def __init__(
        self, parallel: ParallelContext, names: Sequence[MlpNames], shape: tuple[int, int]
    ) -> None:
        self._ops = parallel.ops
        self._names = names
        self._shape = hidden, inner = shape
        self._share = share = parallel.inner_share(inner)
        self._gate_up: tuple[Tensor, ...] = (parallel.empty(len(names), 2 * len(share), hidden),)
        self._down: tuple[Tensor, ...] = (parallel.empty(len(names), hidden, len(share)),)

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        hidden, inner = self._shape
        first, width = self._share.start, len(self._share)
        for names, gate_up, down in zip(self._names, self._gate_up[0], self._down[0], strict=True):
            rows = ((names.gate, gate_up[:width]), (names.up, gate_up[width:]))
            for name, target in rows:
                yield WeightShard(f"{name}.weight", target, (inner, hidden), (first, 0))
            yield WeightShard(f"{names.down}.weight", down, (hidden, inner), (0, first))

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        self._gate_up = self._ops.pack_experts(self._gate_up[0])
        self._down = self._ops.pack_experts(self._down[0])

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the weighted sums, [tokens, hidden]; see ``Ops.moe``."""
        return self._ops.moe(x, self._gate_up, self._down, ids, weights)

    def run_fused(
        self, fused: FusedExperts, x: Tensor, slots: Tensor, weights: Tensor, max_tokens: int
    ) -> Tensor:
        """The weighted sums over the experts of all ranks, by the backend's fused ops."""
        weight = self._gate_up, self._down
        return fused.run(x, *weight, slots, weights, max_tokens=max_tokens)

    def exchange(self, moved: MoveExperts) -> None:
        """Replace some of the experts; see ``MoveExperts``."""
        for name in ("_gate_up", "_down"):
            weights = self._ops.unpack_experts(getattr(self, name))
            setattr(self, name, ())  # packed and unpacked weights may not both fit into memory
            experts, arrived = moved(weights)
            weights[experts] = arrived
            setattr(self, name, self._ops.pack_experts(weights))


def make_expert_weights(
    parallel: ParallelContext,
    names: Sequence[MlpNames],
    held: Sequence[int],
    shape: tuple[int, int],
) -> ExpertWeights:
    """Make a rank's part of a layer's experts, quantised if the model asks for it.

    Without expert parallelism every rank holds a slice of every expert, so the ranks have equal
    work whatever the routing, and any number of ranks is possible. With expert parallelism the
    ranks of a part slice the experts of the part.

    Args:
        parallel: the parallel context of the rank.
        names: names of every expert's linears, with all numbers filled in.
        held: the experts that this rank holds, whole or a slice of each, in order.
        shape: hidden and inner size, on all ranks together.
    """
    if parallel.quantization is not None:
        made = parallel.quantization.make_experts(parallel, names, held, shape)
        if made is not None:
            return made
    return DenseExperts(parallel, [names[expert] for expert in held], shape)


class ExpertCounts:
    """Counts the tokens of a layer's experts since the start, as far as this rank knows them.

    Args:
        num_experts: number of experts in the layer.
        slots: the expert in each slot.
        device: device that holds the counts.

    Attributes:
        num_moved: experts that have come to this rank from others.
    """

    def __init__(self, num_experts: int, slots: Sequence[int], device: torch.device) -> None:
        self._tokens = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._before = torch.zeros_like(self._tokens)
        self._sent_on_device = torch.zeros((), dtype=torch.int64, device=device)
        self._sent = 0
        self.slots = tuple(slots)
        self.num_moved = 0

    def of(self, ids: Tensor) -> Tensor:
        """Tokens by expert, [experts] int64, of a batch's choices. Does not add them."""
        return torch.bincount(ids.flatten(), minlength=len(self._tokens))

    def add(self, tokens: Tensor) -> None:
        """Add tokens of all ranks, by expert."""
        self._tokens += tokens

    def add_sent(self, rows: int | Tensor) -> None:
        """Add a number of rows that this rank sent to others, known to the host or the device."""
        if isinstance(rows, int):
            self._sent += rows
        else:
            self._sent_on_device += rows

    @property
    def num_sent_rows(self) -> int:
        """Rows that this rank has sent to others. Waits for the device."""
        return self._sent + int(self._sent_on_device)

    def reset(self) -> None:
        """Reset all counts, as the tokens so far belonged to no request."""
        self._tokens.zero_()
        self._before.zero_()
        self._sent_on_device.zero_()
        self._sent = 0

    def record_placement(self, slots: Sequence[int], num_moved: int) -> None:
        """Record a new placement.

        Args:
            slots: the expert in each slot from now on.
            num_moved: number of experts that came to this rank from others.
        """
        self.slots = tuple(slots)
        self.num_moved += num_moved
        self._before = self._tokens.clone()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of all ranks, by expert. Waits for the device."""
        return tuple(self._tokens.tolist())

    @property
    def placed_tokens(self) -> tuple[int, ...]:
        """As ``tokens``, since the last placement."""
        return tuple((self._tokens - self._before).tolist())


class MixtureOfExperts:
    """Routed experts, and optionally shared experts, which every token uses.

    Args:
        parallel: the parallel context of the rank.
        router: chooses routed experts.
        experts: the routed experts.
        shared: the shared experts, as one MLP; None if the model has none.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        router: Router,
        experts: ExpertWeights,
        shared: GatedMlp | None,
    ) -> None:
        self._communicator = parallel.communicator
        self._router = router
        self._experts = experts
        self._shared = shared

    def weight_shards(self) -> Iterator[WeightShard]:
        """The parts of checkpoint tensors to load."""
        yield from self._router.weight_shards()
        yield from self._experts.weight_shards()
        if self._shared is not None:
            yield from self._shared.weight_shards()

    def process_weights_after_loading(self) -> None:
        """Convert the loaded weights to the backend's layout."""
        self._router.process_weights_after_loading()
        self._experts.process_weights_after_loading()
        if self._shared is not None:
            self._shared.process_weights_after_loading()

    def __call__(self, x: Tensor) -> Tensor:
        """Map [tokens, hidden] to [tokens, hidden], with one all-reduce for all experts."""
        partial = self._experts(x, *self._router(x))
        if self._shared is not None:
            partial = partial + self._shared.partial(x)
        return self._communicator.all_reduce(partial) if self._communicator else partial
