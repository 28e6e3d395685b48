"""Linear layers and experts with fp8 weights.

Our kernels quantise the activations. Linear layers whose weights have scales of rows are multiplied
by ``torch._scaled_mm``, everything else by our kernels.

``torch._scaled_mm`` accepts e4m3 whose dimensions are multiples of 16 (as the contract requires), x
with dense rows, the weight with dense columns, and float32 scales of rows, [rows, 1] and
[1, columns], for bfloat16 results only. It supports scales of blocks on sm_90 with CUDA 12.9 only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mooncake_hal.fp8_linear import FP8_BLOCK, Fp8Weight
from mooncake_hal_cuda.kernels.fp8_kernels import (
    fp8_block_matmul,
    fp8_grouped_matmul,
    quantise_blocks,
    quantise_rows,
)
from mooncake_hal_cuda.launch_tuning import NEIGHBOURS, Tuning, power_of_two

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_hal_cuda.moe_launch import Grouping

_ROW_ELEMENTS = 4096
_BLOCKS_TOGETHER = 8
_E4M3 = torch.float8_e4m3fn


def pack(weight: Fp8Weight) -> Fp8Weight:
    """Make values and scales contiguous and scales float32, as all launches expect."""
    return Fp8Weight(
        weight.values.contiguous(),
        weight.scales.float().contiguous(),
        None if weight.input_scale is None else weight.input_scale.float().contiguous(),
    )


def multiply(x: Tensor, weight: Fp8Weight, bias: Tensor | None, tuning: Tuning) -> Tensor:
    """Compute ``fp8_linear``, dispatched by the kind of scales."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if len(x) == 0:
        return x.new_empty(0, len(weight.values))
    if weight.is_blockwise:
        return _multiply_blocks(*quantised_blocks(x), weight, bias, x.dtype, tuning)
    return multiply_rows(*quantised_rows(x, weight.input_scale), weight, bias, x.dtype)


def quantised_rows(
    x: Tensor, input_scale: Tensor | None = None, *, is_gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise x, or ``silu_mul`` of a gated x, per row.

    Returns:
        The values in e4m3 and the scale of each row, [rows, 1] float32.
    """
    rows, dim = len(x), x.shape[1] // (2 if is_gated else 1)
    values = torch.empty((rows, dim), dtype=_E4M3, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    quantise_rows[(rows,)](
        values,
        scales,
        x,
        scales if input_scale is None else input_scale,
        x.stride(0),
        HAS_SCALE=input_scale is not None,
        IS_GATED=is_gated,
        DIM=dim,
        WIDTH=min(power_of_two(dim), _ROW_ELEMENTS),
        num_warps=4,
    )
    return values, scales


def quantised_blocks(x: Tensor, *, is_gated: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise x, or ``silu_mul`` of a gated x, per row and block of 128 elements.

    Returns:
        The values in e4m3 and the scale of each block, [rows, blocks] float32.
    """
    rows, dim = len(x), x.shape[1] // (2 if is_gated else 1)
    blocks = -(-dim // FP8_BLOCK)
    values = torch.empty((rows, dim), dtype=_E4M3, device=x.device)
    scales = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
    together = min(_BLOCKS_TOGETHER, power_of_two(blocks))
    quantise_blocks[(rows, -(-blocks // together))](
        values,
        scales,
        x,
        x.stride(0),
        IS_GATED=is_gated,
        DIM=dim,
        BLOCK=FP8_BLOCK,
        GROUPS=together,
        num_warps=4,
    )
    return values, scales


def multiply_rows(
    values: Tensor,  # [rows, in] e4m3
    scales: Tensor,  # [rows, 1] float32
    weight: Fp8Weight,  # with scales of rows
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # [rows, out]
    """Multiply with torch.

    For result types other than bfloat16, the scales are applied after the product. For float32 the
    operands are converted to float32 first, because matrix units drop bits when they sum products
    of e4m3; see ``fp8_kernels``.
    """
    columns = weight.scales.unsqueeze(0)
    if dtype is torch.float32:
        wide = values.float() @ weight.values.float().t()
    else:
        scaled_mm: Callable[..., Tensor] = torch._scaled_mm
        right = weight.values.t()
        if dtype is torch.bfloat16:
            return scaled_mm(values, right, scales, columns, bias=bias, out_dtype=dtype)
        one = scales.new_ones(())
        wide = scaled_mm(values, right, one, one, out_dtype=torch.float32)
    wide = wide.mul_(scales).mul_(columns)
    return (wide if bias is None else wide.add_(bias)).to(dtype)


def _multiply_blocks(
    values: Tensor,
    scales: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    dtype: torch.dtype,
    tuning: Tuning,
) -> Tensor:
    rows, (fan_out, fan_in) = len(values), weight.values.shape
    tile = tuning.fp8_matmul(rows)
    out = torch.empty((rows, fan_out), dtype=dtype, device=values.device)
    fp8_block_matmul[(-(-rows // tile.rows) * -(-fan_out // tile.columns),)](
        out,
        values,
        scales,
        weight.values,
        weight.scales,
        out if bias is None else bias,
        rows,
        HAS_BIAS=bias is not None,
        IS_EXACT=dtype is torch.float32,
        IN=fan_in,
        OUT=fan_out,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK=tile.depth,
        GROUP=NEIGHBOURS,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def multiply_experts(
    x: Tensor,  # [pairs // per_row, in]; gated: [.., 2 * in]
    weights: Fp8Weight,  # of [experts, out, in]
    grouping: Grouping,
    per_row: int,
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
) -> Tensor:  # [pairs, out]
    """Multiply the row of each (token, expert) pair, or ``silu_mul`` of a gated row, by the weights
    of the pair's expert."""
    x = x if x.stride(1) == 1 else x.contiguous()
    quantised = quantised_blocks if weights.is_blockwise else quantised_rows
    values, scales = quantised(x, is_gated=is_gated)
    _, fan_out, fan_in = weights.values.shape
    tile, tiles = grouping.tile, len(grouping.tile_experts)
    out = torch.empty((len(x) * per_row, fan_out), dtype=dtype, device=x.device)
    fp8_grouped_matmul[(tiles * -(-fan_out // tile.columns),)](
        out,
        values,
        scales,
        weights.values,
        weights.scales,
        grouping.order,
        grouping.tile_experts,
        grouping.tile_rows,
        tiles,
        IS_BLOCKWISE=weights.is_blockwise,
        IS_EXACT=x.dtype is torch.float32,
        IN=fan_in,
        OUT=fan_out,
        PER_ROW=per_row,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK=tile.depth,
        GROUP=NEIGHBOURS,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
