"""Norms, rotation and gated activation: float32 inside, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels.registry import kernel, require

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@kernel("npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    require(x.dtype in _FLOATS, f"npu_rms_norm takes {_FLOATS}, not {x.dtype}")
    require(gamma.dtype == x.dtype, f"gamma is {gamma.dtype}, x is {x.dtype}")
    require(x.dim() <= 8, "npu_rms_norm takes up to 8 dimensions")
    wide = x.float()
    reciprocal = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal * gamma.float()).to(x.dtype), reciprocal


@kernel("npu_add_rms_norm")
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    require(x1.shape == x2.shape, f"x1 is {tuple(x1.shape)}, x2 {tuple(x2.shape)}")
    require(x1.dtype == x2.dtype, f"x1 is {x1.dtype}, x2 {x2.dtype}")
    total = x1 + x2
    normed, reciprocal = rms_norm(total, gamma, epsilon)
    return normed, reciprocal, total


@kernel("npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    require(x.dtype in _FLOATS, f"npu_swiglu takes {_FLOATS}, not {x.dtype}")
    require(x.shape[dim] % 2 == 0, f"npu_swiglu halves a dimension of {x.shape[dim]}")
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@kernel("npu_rotary_mul")
def rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    require(rotary_mode == "half" and rotate is None, "the emulation rotates halves only")
    require(x.dim() == 4, f"npu_rotary_mul takes 4 dimensions, not {x.dim()}")
    require(x.dtype == r1.dtype == r2.dtype, f"input is {x.dtype}, r1 {r1.dtype}, r2 {r2.dtype}")
    require(x.shape[-1] < 896 and x.shape[-1] % 2 == 0, f"D is {x.shape[-1]}: even, below 896")
    require(x.shape[0] < 1000 and x.shape[2] < 1000, "B and N of BSND are below 1000")
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * r1.float() + turned * r2.float()).to(x.dtype)
