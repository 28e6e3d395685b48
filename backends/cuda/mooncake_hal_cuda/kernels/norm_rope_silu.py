"""Per-token kernels of a layer: RMS norm, rotary embedding, and the MLP's gate (SiLU and mul)."""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.early_launch import await_predecessor


@triton.jit(do_not_specialize=["inner"])
def rms_norm(
    out,  # dense
    x,
    residual,  # [rows, DIM] dense; overwritten with the sum
    weight,
    eps,
    inner,  # rows per ``outer_stride``
    outer_stride,
    inner_stride,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program: one row. ``out`` may be ``x``."""
    await_predecessor(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < DIM
    x += row // inner * outer_stride + row % inner * inner_stride
    values = tl.load(x + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual += row * DIM
        values += tl.load(residual + dims, mask=is_dim, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + dims, rounded, mask=is_dim)
        values = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / DIM + eps)
    scaled = values * inverse * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + dims, scaled.to(out.dtype.element_ty), mask=is_dim)


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
    """One program: HEADS heads of one token. The first programs rotate queries, the rest keys."""
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
    """Rotate, in place, a tile of a token's TOTAL heads."""
    heads = tile * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HALF_PADDED)[None, :]
    mask = (heads < TOTAL) & (dims < HALF)
    x += heads * head_stride + dims
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(x, (first * cos - second * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(x + HALF, (second * cos + first * sin).to(x.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul(
    out,  # [rows, HALF] dense
    x,  # [rows, 2 * HALF], gate then up
    row_stride,
    IS_EARLY: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: WIDTH elements of one row."""
    await_predecessor(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_dim = dims < HALF
    x += row * row_stride
    gate = tl.load(x + dims, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(x + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(out + row * HALF + dims, (silu(gate) * up).to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def silu(gate):
    """SiLU of float32, in the form whose exponential can't overflow."""
    small = tl.exp(-tl.abs(gate))
    return gate * (tl.where(gate >= 0, 1.0, small) / (1.0 + small))
