"""Rotary positions in the NeoX form, in place; the table holds whatever scaling a model has."""

import triton
import triton.language as tl


@triton.jit
def rope(
    query,
    key,
    positions,
    cos_sin,  # [max_positions, 2 * HALF] float32
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program: HEADS heads of one token, of the query's first and then of the key's."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    cos, sin = angles_at(cos_sin, tl.load(positions + token), HALF, HALF_PADDED)
    if tile < query_tiles:
        query += token * query_token_stride
        rotate_heads(
            query, query_head_stride, tile, cos, sin, QUERY_HEADS, HALF, HALF_PADDED, HEADS
        )
    else:
        key += token * key_token_stride
        tile -= query_tiles
        rotate_heads(key, key_head_stride, tile, cos, sin, KEY_HEADS, HALF, HALF_PADDED, HEADS)


@triton.jit
def angles_at(cos_sin, position, HALF: tl.constexpr, HALF_PADDED: tl.constexpr):
    """Cosines and sines of a position: [1, HALF_PADDED] each."""
    dims = tl.arange(0, HALF_PADDED)
    row = cos_sin + position * (2 * HALF)
    cos = tl.load(row + dims, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(row + HALF + dims, mask=dims < HALF, other=0.0)[None, :]
    return cos, sin


@triton.jit
def rotate_heads(
    x,
    head_stride,
    tile,
    cos,
    sin,
    TOTAL: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate a tile of a token's heads, of which there are TOTAL, in place."""
    heads = tile * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF_PADDED)[None, :]
    mask = (heads < TOTAL) & (dims < HALF)
    x += heads * head_stride + dims
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(x, (first * cos - second * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(x + HALF, (second * cos + first * sin).to(x.dtype.element_ty), mask=mask)
