"""Mixture-of-experts kernels: sort pairs by expert, grouped product, weighted sum."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(
    counts,  # [experts] int32
    expert_ids,  # [pairs] int64
    num_pairs,
    WIDTH: tl.constexpr,
):
    """One program: count the pairs of one expert."""
    expert = tl.program_id(0)
    count = 0
    for begin in range(0, num_pairs, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        ids = tl.load(expert_ids + at, mask=at < num_pairs, other=-1)
        count += tl.sum((ids == expert).to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["num_pairs"])
def group_pairs(
    order,  # [tiles * ROWS] int32, each expert's pairs from a tile boundary on; the rest is unset
    tile_experts,  # [tiles] int32, filled with -1 by the caller
    tile_rows,  # [tiles] int32, number of pairs in each tile
    counts,
    expert_ids,
    num_pairs,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: write the pairs of one expert, and the tiles that they fill."""
    expert = tl.program_id(0)
    others = tl.arange(0, EXPERTS_PADDED)
    before = tl.load(counts + others, mask=(others < expert) & (others < EXPERTS), other=0)
    first_tile = tl.sum((before + ROWS - 1) // ROWS, 0)
    count = tl.load(counts + expert)
    for tile in range(0, tl.cdiv(count, ROWS)):
        tl.store(tile_experts + first_tile + tile, expert)
        tl.store(tile_rows + first_tile + tile, tl.minimum(count - tile * ROWS, ROWS))
    next_place = first_tile * ROWS
    for begin in range(0, num_pairs, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        ids = tl.load(expert_ids + at, mask=at < num_pairs, other=-1)
        is_ours = (ids == expert).to(tl.int32)
        place = next_place + tl.cumsum(is_ours, 0) - 1
        tl.store(order + place, at, mask=is_ours == 1)
        next_place += tl.sum(is_ours, 0)


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
    GROUP: tl.constexpr,  # row tiles that are scheduled next to each other, to share weights in L2
    PRECISION: tl.constexpr,
):
    """One program: a tile of one expert's rows by COLUMNS columns."""
    tile, column_block = tiles_of_program(num_tiles, (OUT + COLUMNS - 1) // COLUMNS, GROUP)
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


@triton.jit
def tiles_of_program(num_tiles, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile) of the current program; there are ``num_tiles`` row tiles."""
    per_group: tl.constexpr = GROUP * COLUMN_TILES
    first = tl.program_id(0) // per_group * GROUP
    height = tl.minimum(num_tiles - first, GROUP)
    tile = first + tl.program_id(0) % per_group % height
    return tile, tl.program_id(0) % per_group // height


@triton.jit
def combine_experts(
    out,  # [tokens, DIM] dense
    parts,  # [tokens * CHOSEN, DIM] float32, dense
    expert_weights,  # [tokens, CHOSEN] float32, dense
    CHOSEN: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: the weighted sum of WIDTH elements of one token."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_dim = dims < DIM
    total = tl.zeros([WIDTH], tl.float32)
    for choice in range(0, CHOSEN):
        weight = tl.load(expert_weights + token * CHOSEN + choice)
        at = (token * CHOSEN + choice) * DIM + dims
        total += weight * tl.load(parts + at, mask=is_dim, other=0.0)
    tl.store(out + token * DIM + dims, total.to(out.dtype.element_ty), mask=is_dim)
