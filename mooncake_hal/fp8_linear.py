"""Linear layers whose weights are fp8 (e4m3) numbers with scales, for backends that multiply such.

A weight is its number times its scale. Scales are of rows (per channel; one for a whole tensor is
that of each row), or of blocks of 128 by 128 as DeepSeek-V3 publishes them. Activations are
quantised as they come: each row of x by its own largest element, with scales of blocks each 128
elements of it; or, with rows, by one scale that the checkpoint has (static).
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
    """The weight of a linear layer.

    Args:
        values: [out, in] float8_e4m3fn; both are multiples of 16.
        scales: float32, [out] of rows, or [ceil(out / 128), ceil(in / 128)] of blocks.
        input_scale: [] float32, what x is divided by; None: by what its largest elements say.
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    @property
    def is_blockwise(self) -> bool:
        """Whether scales are of blocks."""
        return self.scales.dim() == 2


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
