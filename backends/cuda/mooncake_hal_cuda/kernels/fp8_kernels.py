"""fp8 (e4m3) linear layers: rows quantised on the way in, and the product of scaled blocks."""

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)
_TINY = tl.constexpr(1e-12)


@triton.jit
def quantise_rows(
    out,  # [rows, DIM] e4m3, dense
    scales,  # [rows] float32; written
    x,  # [rows, DIM]
    input_scale,  # [] float32; read only if HAS_SCALE
    x_stride,
    HAS_SCALE: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: a row, by its largest element or by the scale that is given."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    x += row * x_stride
    if HAS_SCALE:
        scale = tl.load(input_scale)
    else:
        largest = tl.zeros([WIDTH], tl.float32)
        for begin in range(0, DIM, WIDTH):
            at = begin + dims
            values = tl.load(x + at, mask=at < DIM, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(values))
        scale = tl.div_rn(tl.maximum(tl.max(largest, 0), _TINY), _LARGEST)
    tl.store(scales + row, scale)
    for begin in range(0, DIM, WIDTH):
        at = begin + dims
        values = tl.load(x + at, mask=at < DIM, other=0.0).to(tl.float32)
        values = tl.clamp(tl.div_rn(values, scale), -_LARGEST, _LARGEST)
        tl.store(out + row * DIM + at, values.to(out.dtype.element_ty), mask=at < DIM)


@triton.jit
def quantise_blocks(
    out,  # [rows, DIM] e4m3, dense
    scales,  # [rows, ceil(DIM / BLOCK)] float32, dense; written
    x,  # [rows, DIM]
    x_stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,  # blocks of a program
):
    """One program: some blocks of a row, each by its largest element."""
    row = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = groups[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = at < DIM
    values = tl.load(x + row * x_stride + at, mask=is_in, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 1), _TINY)
    scale = tl.div_rn(largest, _LARGEST)
    values = tl.clamp(tl.div_rn(values, scale[:, None]), -_LARGEST, _LARGEST)
    tl.store(out + row * DIM + at, values.to(out.dtype.element_ty), mask=is_in)
    tl.store(scales + row * blocks + groups, scale, mask=groups < blocks)


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
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # at most BLOCK, and divides it
    BLOCK: tl.constexpr,  # columns of x, and rows and columns of the weight, that share a scale
    GROUP: tl.constexpr,  # tiles of rows that run beside each other, to share weights in the cache
):
    """One program: a tile of ROWS by COLUMNS; each block's products are scaled and added up in
    float32, which also makes up for what Hopper's matrix units leave out of long sums."""
    blocks: tl.constexpr = (IN + BLOCK - 1) // BLOCK
    columns_total: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    per_group: tl.constexpr = GROUP * columns_total
    first = tl.program_id(0) // per_group * GROUP
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP)
    row_block = first + tl.program_id(0) % per_group % height
    column_block = tl.program_id(0) % per_group // height

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
        sums += tl.dot(left, right) * scales[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    mask = is_row[:, None] & is_column[None, :]
    out += rows[:, None].to(tl.int64) * OUT + columns[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=mask)
