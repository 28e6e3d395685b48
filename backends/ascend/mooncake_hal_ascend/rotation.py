"""Rotation by halves, in float32 as its table is."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch_npu
from torch import Tensor


class Angles(NamedTuple):
    """Cosines and sines of tokens' positions, for all elements: each [tokens, rotary_dim] float32,
    their second half like the first."""

    cos: Tensor
    sin: Tensor


def angles_of(positions: Tensor, cos_sin: Tensor) -> Angles:
    """The rows of ``Ops.rope``'s table that the tokens take."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    return Angles(torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


def rotated(rows: Tensor, angles: Angles) -> Tensor:
    """Rows [tokens, heads, rotary_dim], rotated: in float32."""
    cos, sin = (each.view(1, len(rows), 1, rows.shape[-1]) for each in angles)
    found = torch_npu.npu_rotary_mul(rows.float().unsqueeze(0), cos, sin)
    return found[0]  # type: ignore[no-any-return]  # torch_npu has no types
