"""Brings the (token, choice) pairs of a layer of experts into the order of their experts.

Counting sort in two launches, stable and without atomics, so that the order and with it every
sum is the same each time. Nothing here comes back to the host: whoever launches takes buffers of
the largest size that any choice can need.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(
    counts,  # [experts] int32
    expert_ids,  # [pairs] int64
    num_pairs,
    WIDTH: tl.constexpr,
):
    """One program: how many pairs chose one expert."""
    expert = tl.program_id(0)
    count = 0
    for begin in range(0, num_pairs, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        ids = tl.load(expert_ids + at, mask=at < num_pairs, other=-1)
        count += tl.sum((ids == expert).to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["num_pairs"])
def group_pairs(
    order,  # [tiles * ROWS] int32, pairs of each expert from a tile's begin on; the rest is unset
    tile_experts,  # [tiles] int32, filled with -1 before
    tile_rows,  # [tiles] int32, how many rows of the tile are pairs
    counts,
    expert_ids,
    num_pairs,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: the pairs of one expert, and the tiles that it fills."""
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
