"""Weights in the form that the matrix units read: FRACTAL_NZ, tiles of 16 by 16."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

FORMAT_NZ = 29
"""ACL_FORMAT_FRACTAL_NZ."""
_TILE = 16
_DTYPES = (torch.bfloat16, torch.float16)


def to_nz(weight: Tensor) -> Tensor:
    """The weight in NZ, or as it is where tiles would need padding or the type has none.

    The shape stays; only matrix products may read the result.
    """
    dense = weight.contiguous()
    is_whole = all(size % _TILE == 0 for size in weight.shape[-2:])
    if not is_whole or weight.dtype not in _DTYPES:
        return dense
    return torch_npu.npu_format_cast(dense, FORMAT_NZ)  # type: ignore[no-any-return]  # no types
