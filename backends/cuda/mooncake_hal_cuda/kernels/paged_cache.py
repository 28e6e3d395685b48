"""Paged caches of any strides: offsets of tokens, and kernels that write KV and latents."""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.norm_rope_silu import angles_at, rotate_heads


@triton.jit
def token_offsets(
    table,
    begin,
    stop,
    strides,  # (block, token) of the first plane, then (block, token) of the second
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Offsets of TOKENS tokens from ``begin`` on in both planes: [TOKENS] int64 each."""
    if BLOCK_SIZE % TOKENS == 0:  # all tokens are in one block
        block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
        inside = begin % BLOCK_SIZE + tl.arange(0, TOKENS)
    else:
        seen = begin + tl.arange(0, TOKENS)
        if MASKED:
            block = tl.load(table + seen // BLOCK_SIZE, mask=seen < stop, other=0).to(tl.int64)
        else:
            block = tl.load(table + seen // BLOCK_SIZE).to(tl.int64)
        inside = seen % BLOCK_SIZE
    first = block * strides[0] + inside * strides[1]
    return first, block * strides[2] + inside * strides[3]


@triton.jit
def clamped_token_offsets(
    table, begin, stop, strides, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr
):
    """``token_offsets``, with the offset of the last token before ``stop`` in place of later ones,
    which may never have been written."""
    seen = tl.minimum(begin + tl.arange(0, TOKENS), stop - 1)
    if BLOCK_SIZE % TOKENS == 0:
        block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table + seen // BLOCK_SIZE).to(tl.int64)
    inside = seen % BLOCK_SIZE
    first = block * strides[0] + inside * strides[1]
    return first, block * strides[2] + inside * strides[3]


@triton.jit
def write_kv(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    key_factor,  # reciprocal of the keys' KV scale; used only for caches of a narrower type
    value_factor,  # the same for values
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program: all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    block = slot // BLOCK_SIZE
    inside = slot % BLOCK_SIZE
    _copy(
        key + token * key_token_stride,
        key_cache + block * key_block_stride + inside * key_slot_stride,
        key_head_stride, key_cache_head_stride, key_factor,
        HEADS, HEADS_PADDED, KEY_DIM, KEY_PADDED,
    )  # fmt: skip
    _copy(
        value + token * value_token_stride,
        value_cache + block * value_block_stride + inside * value_slot_stride,
        value_head_stride, value_cache_head_stride, value_factor,
        HEADS, HEADS_PADDED, VALUE_DIM, VALUE_PADDED,
    )  # fmt: skip


@triton.jit
def _copy(
    source,
    target,
    source_stride,
    target_stride,
    factor,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    mask = (heads < HEADS) & (dims < DIM)
    values = tl.load(source + heads * source_stride + dims, mask=mask)
    tl.store(
        target + heads * target_stride + dims, to_cache_dtype(values, target, factor), mask=mask
    )


@triton.jit
def to_cache_dtype(values, cache, factor):
    """Convert values to the cache's type, scaled and clamped to its range if it is e4m3."""
    if cache.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32) * factor, -448.0, 448.0).to(tl.float8e4nv)
    return values


@triton.jit
def write_latents(
    query,  # rotated in place
    compressed,  # [tokens, LATENT_DIM + 2 * HALF]
    weight,
    eps,
    positions,
    cos_sin,  # [max_positions, 2 * HALF] float32
    latent_cache,
    rope_cache,
    slot_mapping,
    query_token_stride,
    query_head_stride,
    compressed_stride,
    latent_block_stride,
    latent_slot_stride,
    rope_block_stride,
    rope_slot_stride,
    latent_factor,  # reciprocal of the latents' KV scale; used only for caches of a narrower type
    rope_factor,  # the same for rope rows
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program: HEADS heads of one token's query. The token's last program: its latent and its
    rope row."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos, sin = angles_at(cos_sin, tl.load(positions + token), HALF, HALF_PADDED)
    if tile < (QUERY_HEADS + HEADS - 1) // HEADS:
        query += token * query_token_stride
        rotate_heads(
            query, query_head_stride, tile, cos, sin, QUERY_HEADS, HALF, HALF_PADDED, HEADS
        )
    else:
        slot = tl.load(slot_mapping + token)
        block, inside = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        compressed += token * compressed_stride
        latent_cache += block * latent_block_stride + inside * latent_slot_stride
        _norm(compressed, latent_cache, weight, eps, latent_factor, LATENT_DIM, LATENT_PADDED)
        rope_cache += block * rope_block_stride + inside * rope_slot_stride
        _rotate(compressed + LATENT_DIM, rope_cache, cos, sin, rope_factor, HALF, HALF_PADDED)


@triton.jit
def _norm(source, target, weight, eps, factor, DIM: tl.constexpr, PADDED: tl.constexpr):
    dims = tl.arange(0, PADDED)
    is_dim = dims < DIM
    values = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / DIM + eps)
    scaled = values * inverse * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    scaled = scaled.to(source.dtype.element_ty)
    tl.store(target + dims, to_cache_dtype(scaled, target, factor), mask=is_dim)


@triton.jit
def _rotate(source, target, cos, sin, factor, HALF: tl.constexpr, PADDED: tl.constexpr):
    dims = tl.arange(0, PADDED)[None, :]
    is_dim = dims < HALF
    first = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
    rotated = (first * cos - second * sin).to(source.dtype.element_ty)
    tl.store(target + dims, to_cache_dtype(rotated, target, factor), mask=is_dim)
    rotated = (second * cos + first * sin).to(source.dtype.element_ty)
    tl.store(target + HALF + dims, to_cache_dtype(rotated, target, factor), mask=is_dim)
