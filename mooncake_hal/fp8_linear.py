"""Linear layers and experts whose weights are fp8 (e4m3) numbers with scales, for backends that
multiply such.

A weight is its number times its scale. Scales are of rows (per channel; one for a whole tensor is
that of each row), or of blocks of 128 by 128 as DeepSeek-V3 publishes them. Activations are
quantised as they come: each row of x by its own largest element, with scales of blocks each 128
elements of it; or, with rows, by one scale that the checkpoint has (static). Between the two
products of experts they are quantised again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FP8_BLOCK = 128
"""Rows and columns that share a scale."""
FP8_MULTIPLE = 16
"""Rows and columns of every weight are multiples of it, as matrix libraries ask."""
FP8_TINY = 1e-12
"""What a row of zeros has as its largest element, so that it can be divided by."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """The weight of a linear layer, or those of a layer's experts, with one dimension before.

    Args:
        values: [out, in] or [experts, out, in] float8_e4m3fn; out and in are multiples of 16.
        scales: float32, [out] of rows, or [ceil(out / 128), ceil(in / 128)] of blocks; of experts
            [experts, ...].
        input_scale: [] float32, what x is divided by; None: by what its largest elements say.
            Experts have none.
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    @property
    def is_blockwise(self) -> bool:
        """Whether scales are of blocks."""
        return self.scales.dim() == self.values.dim()


class Fp8LinearOps(Protocol):
    """What the ``ops`` of a backend with ``"fp8"`` in ``capabilities.quantization`` also do."""

    def pack_fp8_weight(self, weight: Fp8Weight) -> Fp8Weight:
        """Return the weight in the form that ``fp8_linear`` runs on best.

        Called once per weight after loading; the caller then drops the original. The result is
        opaque: only ``fp8_linear`` takes it.
        """
        ...

    def fp8_linear(
        self,
        x: Tensor,  # [tokens, in]
        weight: Fp8Weight,  # what pack_fp8_weight returned for [out, in]
        bias: Tensor | None,  # [out]
    ) -> Tensor:  # [tokens, out]
        """``x @ weight.T + bias`` of quantised x.

        A row of x (or 128 elements of it) is divided by its scale, which is its largest absolute
        value / 448, and rounded to e4m3; with ``input_scale`` by that, what is too large becomes
        the largest number there is. Products are summed in float32 at least within 128 columns. A
        row of the result depends on that row of x alone.
        """
        ...


class Fp8ExpertOps(Protocol):
    """What the ``ops`` of a backend with ``"fp8_experts"`` in ``capabilities.quantization`` do."""

    def pack_fp8_experts(self, weights: Fp8Weight) -> Fp8Weight:
        """Return the experts' weights in the form that ``fp8_moe`` runs on best; see
        ``pack_fp8_weight``.

        The result is opaque: only ``fp8_moe`` and ``unpack_fp8_experts`` take it.
        """
        ...

    def unpack_fp8_experts(
        self,
        packed: Fp8Weight,  # what pack_fp8_experts returned for [experts, out, in]
    ) -> Fp8Weight:
        """Numbers and scales as they were before, bit by bit, both dense; may be memory of
        ``packed``, which the caller then uses no more. For experts that move to other ranks."""
        ...

    def fp8_moe(
        self,
        x: Tensor,  # [tokens, hidden]
        gate_up: Fp8Weight,  # what pack_fp8_experts returned for [experts, 2 * inner, hidden]
        down: Fp8Weight,  # what pack_fp8_experts returned for [experts, hidden, inner]
        expert_ids: Tensor,  # [tokens, chosen] int64, all different in a row
        expert_weights: Tensor,  # [tokens, chosen] float32
    ) -> Tensor:  # [tokens, hidden]
        """``Ops.moe`` of quantised rows: x as for ``fp8_linear``, the first product rounded to the
        type of x, ``silu_mul`` of that in float32 and quantised in the same way.

        Both weights have scales of the same kind; with scales of blocks, ``inner`` is a multiple of
        128, so that no block has rows of gate and of up. The sum is made in float32 and rounded
        once.
        """
        ...
