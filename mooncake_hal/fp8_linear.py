"""The contract of linear layers and experts with fp8 (e4m3) weights, for backends that multiply
them natively.

A weight's value is its fp8 number times its scale. There is a scale per row (per channel; a scale
of the whole tensor is repeated for each row), or per block of 128 by 128, as DeepSeek-V3 publishes
them. Activations are quantised dynamically: each row of x (with block scales, each 128 elements of
it) by its own largest element. With row scales, a checkpoint may have a static scale for them
instead. Between the two products of experts, activations are quantised again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FP8_BLOCK = 128
"""Rows and columns of a block that shares a scale."""
FP8_MULTIPLE = 16
"""Both dimensions of every weight are multiples of this, as matrix libraries require."""
FP8_TINY = 1e-12
"""Lower bound of a row's largest element, so that a row of zeros does not divide by zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """The weight of a linear layer, or the weights of a layer's experts, with a leading dimension.

    Args:
        values: [out, in] or [experts, out, in] float8_e4m3fn; out and in are multiples of 16.
        scales: float32, [out] for rows or [ceil(out / 128), ceil(in / 128)] for blocks; with
            experts, [experts, ...].
        input_scale: [] float32, the static scale by which x is divided; None: x is quantised
            dynamically. Experts have none.
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    @property
    def is_blockwise(self) -> bool:
        """Whether there is a scale per block, not per row."""
        return self.scales.dim() == self.values.dim()


class Fp8LinearOps(Protocol):
    """Fp8 linear layers; implemented where ``capabilities.quantization`` has ``"fp8"``."""

    def pack_fp8_weight(self, weight: Fp8Weight) -> Fp8Weight:
        """Return the weight in the layout that ``fp8_linear`` runs fastest on.

        The caller calls this once per weight after loading, then drops the original. The result is
        opaque and accepted by ``fp8_linear`` only.
        """
        ...

    def fp8_linear(
        self,
        x: Tensor,  # [tokens, in]
        weight: Fp8Weight,  # the result of pack_fp8_weight for [out, in]
        bias: Tensor | None,  # [out]
    ) -> Tensor:  # [tokens, out]
        """Return ``x @ weight.T + bias`` with quantised x.

        Each row of x (or 128 elements of it) is divided by its scale, which is its largest absolute
        value / 448, and rounded to e4m3. With ``input_scale``, it is divided by that and saturated
        at the largest finite number. Products are accumulated in float32 at least within 128
        columns. A row of the result depends on that row of x alone.
        """
        ...


class Fp8ExpertOps(Protocol):
    """Fp8 experts; implemented where ``capabilities.quantization`` has ``"fp8_experts"``."""

    def pack_fp8_experts(self, weights: Fp8Weight) -> Fp8Weight:
        """Return the experts' weights in the layout that ``fp8_moe`` runs fastest on, as
        ``pack_fp8_weight`` does for ``fp8_linear``.

        The result is opaque and accepted by ``fp8_moe`` and ``unpack_fp8_experts`` only.
        """
        ...

    def unpack_fp8_experts(
        self,
        packed: Fp8Weight,  # the result of pack_fp8_experts for [experts, out, in]
    ) -> Fp8Weight:
        """Return the original values and scales, bit for bit and both dense, so that experts can
        move to other ranks. The result may share memory with ``packed``, which the caller must not
        use afterwards."""
        ...

    def fp8_moe(
        self,
        x: Tensor,  # [tokens, hidden]
        gate_up: Fp8Weight,  # the result of pack_fp8_experts for [experts, 2 * inner, hidden]
        down: Fp8Weight,  # the result of pack_fp8_experts for [experts, hidden, inner]
        expert_ids: Tensor,  # [tokens, top_k] int64, distinct within a row
        expert_weights: Tensor,  # [tokens, top_k] float32
    ) -> Tensor:  # [tokens, hidden]
        """``Ops.moe`` with quantised activations: x is quantised as for ``fp8_linear``; the first
        product is rounded to x's dtype, and its ``silu_mul`` is computed in float32 and quantised
        in the same way.

        Both weights have the same kind of scales; with block scales, ``inner`` is a multiple of
        128, so that no block spans rows of gate and of up. The sum is accumulated in float32 and
        rounded once.
        """
        ...
