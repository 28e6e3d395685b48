"""A linear layer of one row, which is a lone stream's decode step: our kernel, in place of cuBLAS.

Reading weights is all that matters there, and a step has a hundred such layers behind each other.
Each begins with a few microseconds until its first weights are there. Ours is launched while the
kernel before it still runs (CUDA Programming Guide, programmatic dependent launch): it asks for its
first weights, and only then waits for what is before it. So the kernel right before it must not
have written them, as none of a step does: what a kernel that allows no early launch wrote may not
be there yet, either. What earlier ones wrote is: none but this kernel begins before others end.
On an H200 the layers of an 8 B model read 4.1 TB/s so, 3.9 without, and 3.7 by cuBLAS. Of two rows
it was slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mooncake_hal_cuda.launch_tuning import Tuning, power_of_two

COLUMNS, DEPTH = 2, 1024
"""Of a weight, to a program: of the tiles that were tried on an H200 the fastest."""
_MOST_WEIGHT_BYTES = 256 << 20
"""Larger ones, as of a vocabulary, keep a device busy for so long that cuBLAS is as fast."""


@triton.jit
def gemv(
    out,  # [OUT]
    x,  # [IN], dense
    weight,  # [OUT, IN], dense
    bias,  # [OUT]; read only if HAS_BIAS
    HAS_BIAS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,  # of the result, to a program
    DEPTH: tl.constexpr,
):
    """One program: some elements of the result. Launched early, see above."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < OUT
    depths = tl.arange(0, DEPTH)
    weight += columns[:, None].to(tl.int64) * IN + depths[None, :]
    mask = is_column[:, None] & (depths < IN)[None, :]
    part = tl.load(weight, mask=mask, other=0.0, eviction_policy="evict_first")
    tl.extra.cuda.gdc_wait()
    row = tl.load(x + depths, mask=depths < IN, other=0.0)
    sums = part.to(tl.float32) * row.to(tl.float32)[None, :]
    for begin in range(DEPTH, IN, DEPTH):
        is_in = begin + depths < IN
        mask = is_column[:, None] & is_in[None, :]
        part = tl.load(weight + begin, mask=mask, other=0.0, eviction_policy="evict_first")
        row = tl.load(x + begin + depths, mask=is_in, other=0.0)
        sums += part.to(tl.float32) * row.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=is_column)


def is_faster(x: Tensor, weight: Tensor, bias: Tensor | None, tuning: Tuning) -> bool:
    """Whether ``multiply_row`` is for this layer: where it was measured to be. What does not fit
    together is left to torch, which says so: the kernel would read what lies behind x."""
    return (
        tuning.has_early_launches
        and x.dim() == 2
        and len(x) == 1
        and x.element_size() == 2
        and x.stride(1) == 1
        and x.dtype is weight.dtype
        and x.shape[1] == weight.shape[1]
        and weight.is_contiguous()
        and weight.nbytes <= _MOST_WEIGHT_BYTES
        and (bias is None or (bias.is_contiguous() and bias.shape == weight.shape[:1]))
    )


def multiply_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear`` of a single row: [1, out]."""
    fan_out, fan_in = weight.shape
    out = torch.empty((1, fan_out), dtype=x.dtype, device=x.device)
    gemv[(-(-fan_out // COLUMNS),)](
        out,
        x,
        weight,
        out if bias is None else bias,
        HAS_BIAS=bias is not None,
        IN=fan_in,
        OUT=fan_out,
        COLUMNS=COLUMNS,
        DEPTH=min(DEPTH, power_of_two(fan_in)),
        num_warps=4,
        launch_pdl=True,
    )
    return out
