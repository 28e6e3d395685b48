"""Every pair's row times the weights of its expert."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_matmul(
    out,  # [pairs, OUT] dense
    x,  # [pairs // PER_ROW, IN]
    weights,  # [experts, OUT, IN] dense
    order,
    tile_experts,
    tile_rows,
    num_tiles,
    x_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PER_ROW: tl.constexpr,  # pairs that share a row of x
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,  # tiles of rows that run beside each other, to share weights in the cache
    PRECISION: tl.constexpr,
):
    """One program: a tile of one expert's rows by COLUMNS columns."""
    columns_total: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    per_group: tl.constexpr = GROUP * columns_total
    first = tl.program_id(0) // per_group * GROUP
    height = tl.minimum(num_tiles - first, GROUP)
    tile = first + tl.program_id(0) % per_group % height
    column_block = tl.program_id(0) % per_group // height
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return

    rows = tl.arange(0, ROWS)
    is_row = rows < tl.load(tile_rows + tile)
    pairs = tl.load(order + tile * ROWS + rows, mask=is_row, other=0).to(tl.int64)
    columns = column_block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < OUT
    depths = tl.arange(0, DEPTH)
    x += pairs[:, None] // PER_ROW * x_stride
    weights += expert.to(tl.int64) * (OUT * IN) + columns[None, :].to(tl.int64) * IN
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, IN, DEPTH):
        at = begin + depths
        is_in = at < IN
        left = tl.load(x + at[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        mask = is_column[None, :] & is_in[:, None]
        right = tl.load(weights + at[:, None], mask=mask, other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    mask = is_row[:, None] & is_column[None, :]
    out += pairs[:, None] * OUT + columns[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=mask)
