"""Dispatch, experts and combine by a backend's own ops, for those that have such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mooncake_hal.backend import GroupSpec


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What experts are divided over ranks.

    Args:
        num_slots: places for experts of a layer, all ranks together.
        chosen: experts of each token.
        hidden_size: of a token's row.
    """

    num_slots: int
    chosen: int
    hidden_size: int


class FusedExperts(Protocol):
    """One rank of a group whose ranks have equal shares of all slots, in order."""

    @property
    def most_tokens(self) -> int:
        """Of a rank in one call."""
        ...

    def run(
        self,
        x: Tensor,  # [tokens, hidden]
        gate_up: tuple[Tensor, ...],  # of this rank's slots, as ``Ops.pack_experts`` made them
        down: tuple[Tensor, ...],  # the same
        slots: Tensor,  # [tokens, chosen] int64, of all ranks
        weights: Tensor,  # [tokens, chosen] float32
        *,
        most_tokens: int,
    ) -> Tensor:  # [tokens, hidden]
        """The weighted sums of this rank's tokens' experts, wherever these are; every rank calls
        it, with tokens or without. Nothing is read back to the host.

        Args:
            x, gate_up, down, slots, weights: see above; a token's slots differ.
            most_tokens: that any rank has in this call, the same on every rank.
        """
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


class FusedExpertsBackend(Protocol):
    """A backend whose ``capabilities.fused_experts`` is true."""

    def fused_experts(self, group: GroupSpec, shape: ExpertShape) -> FusedExperts | None:
        """Join ranks in a group of its own, behind those joined at the same address before; every
        rank calls it. None, with the reason in the log, where the ops don't take that shape or so
        many ranks."""
        ...
