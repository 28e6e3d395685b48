"""Linear layers of a single row by our own kernel instead of cuBLAS.

They occur in decode steps of a single request. Such a layer is bound by reading its weights, and a
step runs about a hundred of them in sequence.
Each takes a few microseconds until its first weights have arrived. This kernel hides that latency:
it is launched early (see ``early_launch``), issues the loads of its first weights, and only then
waits for its predecessor.

The kernels that may still run must therefore not have written the weights: their stores may not be
visible yet. They are the step's latest kernels, and no kernel of a step writes weights.

On an H200, the layers of an 8 B model read their weights at 4.1 TB/s this way, at 3.9 TB/s without
early launches, and at 3.7 TB/s with cuBLAS. With two rows, the kernel was slower than cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mooncake_hal_cuda.launch_tuning import Tuning, power_of_two

COLUMNS, DEPTH = 2, 1024
"""A program's tile of the weight: the fastest of the tiles that were tried on an H200."""
_MOST_WEIGHT_BYTES = 256 << 20
"""Larger weights, such as a vocabulary's, take so long to read that cuBLAS is as fast."""


@triton.jit
def gemv(
    out,  # [OUT]
    x,  # [IN], dense
    weight,  # [OUT, IN], dense
    bias,  # [OUT]; read only if HAS_BIAS
    HAS_BIAS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    COLUMNS: tl.constexpr,  # elements of the result per program
    DEPTH: tl.constexpr,
):
    """One program: COLUMNS elements of the result. It is launched early; see the module."""
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
    """Whether ``multiply_row`` is faster than torch for this layer, where it was measured.

    Operands whose shapes or types don't match are left to torch, which raises an error: the kernel
    would read beyond the end of x.
    """
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
    """Compute ``linear`` of a single row; returns [1, out]."""
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
