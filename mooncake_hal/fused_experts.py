"""The contract of fused experts: dispatch, experts and combine as one op of the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mooncake_hal.backend import GroupSpec


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of an expert layer whose experts are divided over ranks.

    Args:
        num_slots: slots for experts of a layer, on all ranks together.
        chosen: experts per token (top-k).
        hidden_size: elements of a token's row.
    """

    num_slots: int
    chosen: int
    hidden_size: int


class FusedExperts(Protocol):
    """One rank of an expert-parallel group; the slots are divided evenly over the ranks, in
    order."""

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens that a rank may pass to one call."""
        ...

    def run(
        self,
        x: Tensor,  # [tokens, hidden]
        gate_up: tuple[Tensor, ...],  # the result of ``Ops.pack_experts`` for this rank's slots
        down: tuple[Tensor, ...],  # the same for the second product
        slots: Tensor,  # [tokens, chosen] int64, numbered over all ranks
        weights: Tensor,  # [tokens, chosen] float32
        *,
        max_tokens: int,
    ) -> Tensor:  # [tokens, hidden]
        """Return the weighted sums of the experts' outputs for this rank's tokens, on whichever
        ranks the experts are. Every rank makes this call, even without tokens. No result is copied
        back to the host.

        Args:
            x, gate_up, down, slots, weights: see above; a token's slots are distinct.
            max_tokens: largest number of tokens of any rank in this call; the same value on every
                rank.
        """
        ...

    def close(self) -> None:
        """Leave the group. Idempotent."""
        ...


class FusedExpertsBackend(Protocol):
    """What a backend also implements if ``capabilities.fused_experts`` is True."""

    def fused_experts(self, group: GroupSpec, shape: ExpertShape) -> FusedExperts | None:
        """Join a new group of ranks for fused experts. Every rank makes this call, in the same
        order relative to other groups at the same address. Returns None and logs the reason if the
        op does not support the shape or the number of ranks."""
        ...
