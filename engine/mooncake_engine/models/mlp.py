"""The gated MLP, and the mixture of experts that stands in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mooncake_engine.models.layers import (
    ColumnLinear,
    LinearSource,
    Placement,
    RowLinear,
    WeightSlot,
)
from mooncake_engine.models.routing import RoutingConfig, choose_experts


class MlpNames(NamedTuple):
    """What the checkpoint calls the linears; ``{}`` stands for the layer's number."""

    gate: str = "model.layers.{}.mlp.gate_proj"
    up: str = "model.layers.{}.mlp.up_proj"
    down: str = "model.layers.{}.mlp.down_proj"

    def of(self, *numbers: int) -> MlpNames:
        """The names with numbers in them: a layer's, or a layer's and an expert's."""
        return MlpNames(*(name.format(*numbers) for name in self))


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``, its inner dimension split over ranks.

    Args:
        placement: where it lives.
        names: of its linears, complete.
        shape: hidden and inner size, all ranks together.
        has_bias: on all three.
    """

    def __init__(
        self,
        placement: Placement,
        names: MlpNames,
        shape: tuple[int, int],
        *,
        has_bias: bool = False,
    ) -> None:
        hidden, inner = shape
        self._ops = placement.ops
        share = placement.share(inner)
        sources = tuple(LinearSource(name, inner, share) for name in (names.gate, names.up))
        self._gate_up = ColumnLinear(placement, sources, hidden, has_bias=has_bias)
        self._down = RowLinear(placement, names.down, share, shape, has_bias=has_bias)

    def slots(self) -> Iterator[WeightSlot]:
        """What to load."""
        yield from self._gate_up.slots()
        yield from self._down.slots()

    def pack(self) -> None:
        """Bring the loaded weights into the backend's form."""
        self._gate_up.pack()
        self._down.pack()

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum that the output is."""
        return self._down.partial(self._ops.silu_mul(self._gate_up(x)))

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        return self._down(self._ops.silu_mul(self._gate_up(x)))


class Router:
    """Sends tokens to experts; whole on every rank, in float32 whatever the model's dtype.

    Args:
        placement: where it lives.
        name: prefix of ``.weight`` in the checkpoint.
        hidden_size: width of its input.
        routing: how it chooses.
    """

    def __init__(
        self, placement: Placement, name: str, hidden_size: int, routing: RoutingConfig
    ) -> None:
        self._ops = placement.ops
        self._name = name
        self._routing = routing
        float32, experts = torch.float32, routing.num_experts
        self._weight = placement.empty(experts, hidden_size, dtype=float32)
        has_bias = routing.has_correction_bias
        self._bias = placement.empty(experts, dtype=float32) if has_bias else None

    def slots(self) -> Iterator[WeightSlot]:
        """What to load."""
        shape = tuple(self._weight.shape)
        yield WeightSlot(f"{self._name}.weight", self._weight, shape, (0, 0))
        if self._bias is not None:
            name = f"{self._name}.e_score_correction_bias"
            yield WeightSlot(name, self._bias, shape[:1], (0,))

    def pack(self) -> None:
        """Bring the loaded weight into the backend's form."""
        self._weight = self._ops.pack_weight(self._weight)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] to expert ids and weights, see ``choose_experts``."""
        logits = self._ops.linear(x.float(), self._weight, None)
        return choose_experts(logits, self._routing, self._bias)


class Experts:
    """Gated MLPs of which each token takes some; the inner dimension is split over ranks.

    So every rank holds a slice of every expert: whatever tokens choose, ranks work alike, and
    any number of ranks will do.

    Args:
        placement: where they live.
        names: of every expert's linears, complete.
        shape: hidden and inner size, all ranks together.
    """

    def __init__(self, placement: Placement, names: list[MlpNames], shape: tuple[int, int]) -> None:
        self._ops = placement.ops
        self._names = names
        self._shape = hidden, inner = shape
        self._share = share = placement.share(inner)
        self._gate_up: tuple[Tensor, ...] = (placement.empty(len(names), 2 * len(share), hidden),)
        self._down: tuple[Tensor, ...] = (placement.empty(len(names), hidden, len(share)),)

    def slots(self) -> Iterator[WeightSlot]:
        """What to load."""
        hidden, inner = self._shape
        first, width = self._share.start, len(self._share)
        for names, gate_up, down in zip(self._names, self._gate_up[0], self._down[0], strict=True):
            rows = ((names.gate, gate_up[:width]), (names.up, gate_up[width:]))
            for name, target in rows:
                yield WeightSlot(f"{name}.weight", target, (inner, hidden), (first, 0))
            yield WeightSlot(f"{names.down}.weight", down, (hidden, inner), (0, first))

    def pack(self) -> None:
        """Bring the loaded weights into the backend's form."""
        self._gate_up = self._ops.pack_experts(self._gate_up[0])
        self._down = self._ops.pack_experts(self._down[0])

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the sum that the output is."""
        return self._ops.moe(x, self._gate_up, self._down, ids, weights)


class MixtureOfExperts:
    """Routed experts, beside them those that every token takes.

    Args:
        placement: where it lives.
        router: chooses.
        experts: are chosen.
        shared: takes every token, if the model has such.
    """

    def __init__(
        self, placement: Placement, router: Router, experts: Experts, shared: GatedMlp | None
    ) -> None:
        self._communicator = placement.communicator
        self._router = router
        self._experts = experts
        self._shared = shared

    def slots(self) -> Iterator[WeightSlot]:
        """What to load."""
        yield from self._router.slots()
        yield from self._experts.slots()
        if self._shared is not None:
            yield from self._shared.slots()

    def pack(self) -> None:
        """Bring the loaded weights into the backend's form."""
        self._router.pack()
        self._experts.pack()
        if self._shared is not None:
            self._shared.pack()

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, hidden]; one sum over ranks for all experts."""
        partial = self._experts.partial(x, *self._router(x))
        if self._shared is not None:
            partial = partial + self._shared.partial(x)
        return self._communicator.all_reduce(partial) if self._communicator else partial
