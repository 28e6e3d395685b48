"""Kernels of fp8 (e4m3) linear layers and experts: quantisation of activations, and products."""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.moe_kernels import tiles_of_program
from mooncake_hal_cuda.kernels.norm_rope_silu import silu

_LARGEST = tl.constexpr(448.0)
_TINY = tl.constexpr(1e-12)


@triton.jit
def quantise_rows(
    out,  # [rows, DIM] e4m3, dense
    scales,  # [rows] float32, output
    x,  # [rows, DIM], or gate then up if IS_GATED: [rows, 2 * DIM]
    input_scale,  # [] float32; read only if HAS_SCALE
    x_stride,
    HAS_SCALE: tl.constexpr,
    IS_GATED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: a row, scaled by its largest element or by ``input_scale``."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    x += row * x_stride
    if HAS_SCALE:
        scale = tl.load(input_scale)
    else:
        largest = tl.zeros([WIDTH], tl.float32)
        for begin in range(0, DIM, WIDTH):
            at = begin + dims
            values = _load(x, at, at < DIM, DIM, IS_GATED)
            largest = tl.maximum(largest, tl.abs(values))
        scale = tl.div_rn(tl.maximum(tl.max(largest, 0), _TINY), _LARGEST)
    tl.store(scales + row, scale)
    for begin in range(0, DIM, WIDTH):
        at = begin + dims
        values = _load(x, at, at < DIM, DIM, IS_GATED)
        values = tl.clamp(tl.div_rn(values, scale), -_LARGEST, _LARGEST)
        tl.store(out + row * DIM + at, values.to(out.dtype.element_ty), mask=at < DIM)


@triton.jit
def quantise_blocks(
    out,  # [rows, DIM] e4m3, dense
    scales,  # [rows, ceil(DIM / BLOCK)] float32, dense, output
    x,  # [rows, DIM], or gate then up if IS_GATED: [rows, 2 * DIM]
    x_stride,
    IS_GATED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,  # blocks per program
):
    """One program: GROUPS blocks of a row, each scaled by its largest element."""
    row = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = at < DIM
    values = _load(x + row * x_stride, at, is_in, DIM, IS_GATED)
    largest = tl.maximum(tl.max(tl.abs(values), 1), _TINY)
    scale = tl.div_rn(largest, _LARGEST)
    values = tl.clamp(tl.div_rn(values, scale[:, None]), -_LARGEST, _LARGEST)
    tl.store(out + row * DIM + at, values.to(out.dtype.element_ty), mask=is_in)
    tl.store(scales + row * blocks + groups, scale, mask=groups < blocks)


@triton.jit
def _load(x, at, mask, DIM: tl.constexpr, IS_GATED: tl.constexpr):
    """Load elements of a row as float32; of a gated row, ``silu(gate) * up``."""
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        values = silu(values) * tl.load(x + DIM + at, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def _products(left, right, IS_EXACT: tl.constexpr):
    """The product of one block, in float32.

    Hopper's matrix units keep only some 14 bits while they accumulate products of e4m3
    (DeepSeek-V3 report, 3.3.2). With operands in bfloat16, which represents every e4m3 number
    exactly, they keep all bits, at half the speed.
    """
    if IS_EXACT:
        left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
    return tl.dot(left, right)


@triton.jit(do_not_specialize=["num_rows"])
def fp8_block_matmul(
    out,  # [rows, OUT] dense
    x,  # [rows, IN] e4m3, dense
    x_scales,  # [rows, ceil(IN / BLOCK)] float32, dense
    weight,  # [OUT, IN] e4m3, dense
    weight_scales,  # [ceil(OUT / BLOCK), ceil(IN / BLOCK)] float32, dense
    bias,  # [OUT]; read only if HAS_BIAS
    num_rows,
    HAS_BIAS: tl.constexpr,
    IS_EXACT: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # at most BLOCK, and divides it
    BLOCK: tl.constexpr,  # columns of x, and rows and columns of the weight, that share a scale
    GROUP: tl.constexpr,  # row tiles that are scheduled next to each other, to share weights in L2
):
    """One program: a tile of ROWS by COLUMNS.

    The product of each block is scaled and accumulated in float32, which recovers most of the
    precision that Hopper's matrix units lose; see ``_products``.
    """
    blocks: tl.constexpr = (IN + BLOCK - 1) // BLOCK
    num_tiles = tl.cdiv(num_rows, ROWS)
    row_block, column_block = tiles_of_program(num_tiles, (OUT + COLUMNS - 1) // COLUMNS, GROUP)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < OUT
    depths = tl.arange(0, BLOCK)
    x += rows[:, None].to(tl.int64) * IN + depths[None, :]
    weight += columns[None, :].to(tl.int64) * IN + depths[:, None]
    x_scales += rows.to(tl.int64) * blocks
    weight_scales += column_block * COLUMNS // BLOCK * blocks
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, blocks):
        is_in = block * BLOCK + depths < IN
        left = tl.load(x + block * BLOCK, mask=is_row[:, None] & is_in[None, :], other=0.0)
        mask = is_column[None, :] & is_in[:, None]
        right = tl.load(weight + block * BLOCK, mask=mask, other=0.0)
        scales = tl.load(x_scales + block, mask=is_row, other=0.0)
        scales *= tl.load(weight_scales + block)
        sums += _products(left, right, IS_EXACT) * scales[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    mask = is_row[:, None] & is_column[None, :]
    out += rows[:, None].to(tl.int64) * OUT + columns[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tiles"])
def fp8_grouped_matmul(
    out,  # [pairs, OUT] dense
    x,  # [pairs // PER_ROW, IN] e4m3, dense
    x_scales,  # float32 [pairs // PER_ROW, ceil(IN / BLOCK)] dense; of rows: [pairs // PER_ROW]
    weights,  # [experts, OUT, IN] e4m3, dense
    weight_scales,  # [experts, ceil(OUT / BLOCK), ceil(IN / BLOCK)]; of rows: [experts, OUT]
    order,
    tile_experts,
    tile_rows,
    num_tiles,
    IS_BLOCKWISE: tl.constexpr,  # whether the scales are of blocks; otherwise of rows
    IS_EXACT: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PER_ROW: tl.constexpr,  # pairs that share a row of x
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # at most BLOCK, and divides it
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: a tile of one expert's rows by COLUMNS columns. Products of a BLOCK are summed
    in float32, see ``fp8_block_matmul``; scales of rows are applied at the end."""
    blocks: tl.constexpr = (IN + BLOCK - 1) // BLOCK
    tile, column_block = tiles_of_program(num_tiles, (OUT + COLUMNS - 1) // COLUMNS, GROUP)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return

    rows = tl.arange(0, ROWS)
    is_row = rows < tl.load(tile_rows + tile)
    pairs = tl.load(order + tile * ROWS + rows, mask=is_row, other=0).to(tl.int64)
    sources = pairs // PER_ROW
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < OUT
    depths = tl.arange(0, BLOCK)
    x += sources[:, None] * IN + depths[None, :]
    weights += expert * (OUT * IN) + columns[None, :].to(tl.int64) * IN + depths[:, None]
    if IS_BLOCKWISE:
        x_scales += sources * blocks
        of_expert: tl.constexpr = (OUT + BLOCK - 1) // BLOCK * blocks
        weight_scales += expert * of_expert + column_block * COLUMNS // BLOCK * blocks
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(0, blocks):
        is_in = block * BLOCK + depths < IN
        left = tl.load(x + block * BLOCK, mask=is_row[:, None] & is_in[None, :], other=0.0)
        mask = is_column[None, :] & is_in[:, None]
        right = tl.load(weights + block * BLOCK, mask=mask, other=0.0)
        products = _products(left, right, IS_EXACT)
        if IS_BLOCKWISE:
            scales = tl.load(x_scales + block, mask=is_row, other=0.0)
            scales *= tl.load(weight_scales + block)
            products *= scales[:, None]
        sums += products
    if not IS_BLOCKWISE:
        sums *= tl.load(x_scales + sources, mask=is_row, other=0.0)[:, None]
        of_columns = tl.load(weight_scales + expert * OUT + columns, mask=is_column, other=0.0)
        sums *= of_columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    out += pairs[:, None] * OUT + columns[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=mask)
