"""How KV is kept in a type narrower than its own: a scale per layer and plane."""

from __future__ import annotations

import torch
from torch import Tensor


def quantised(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``x / scale`` as the cache keeps it; what is too large becomes the largest number.

    A cache of x's own type keeps it as it is.
    """
    if dtype == x.dtype:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp_(-largest, largest).to(dtype)
