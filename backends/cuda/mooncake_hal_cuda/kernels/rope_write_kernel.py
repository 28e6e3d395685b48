"""One kernel for everything between a layer's QKV projection and its attention: norms of queries
and keys, rotation, and the write of keys and values to the paged cache.
"""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.early_launch import await_predecessor
from mooncake_hal_cuda.kernels.norm_rope_silu import angles_at
from mooncake_hal_cuda.kernels.paged_cache import to_cache_dtype


@triton.jit
def rope_and_write_kv(
    query,  # normalised and rotated in place
    key,
    value,
    key_cache,
    value_cache,
    query_weight,
    key_weight,
    eps,
    positions,
    cos_sin,  # [max_positions, 2 * HALF] float32
    slot_mapping,
    query_strides,  # (token, head)
    key_strides,  # (token, head)
    value_strides,  # (token, head)
    key_cache_strides,  # (block, slot, head)
    value_cache_strides,  # (block, slot, head)
    key_factor,  # reciprocal of the keys' KV scale; used only for caches of a narrower type
    value_factor,  # the same for values
    HAS_NORMS: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program: a tile of heads of one token. The first programs have queries, the rest KV."""
    await_predecessor(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cos, sin = angles_at(cos_sin, tl.load(positions + token), HALF, HALF_PADDED)
    if tile < QUERY_TILES:
        query_heads = tile * QUERY_TILE + tl.arange(0, QUERY_TILE)[:, None]
        rows = query + token * query_strides[0] + query_heads * query_strides[1]
        _norm_and_rotate(
            rows, rows, query_heads < QUERY_HEADS, query_weight, eps, cos, sin, 1.0,
            HAS_NORMS, HAS_NORMS, HALF, HALF_PADDED, REST, REST_PADDED,
        )  # fmt: skip
    else:
        heads = (tile - QUERY_TILES) * KV_TILE + tl.arange(0, KV_TILE)[:, None]
        slot = tl.load(slot_mapping + token)
        block, inside = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        target = key_cache + block * key_cache_strides[0] + inside * key_cache_strides[1]
        _norm_and_rotate(
            key + token * key_strides[0] + heads * key_strides[1],
            target + heads * key_cache_strides[2],
            heads < KV_HEADS, key_weight, eps, cos, sin, key_factor,
            HAS_NORMS, True, HALF, HALF_PADDED, REST, REST_PADDED,
        )  # fmt: skip
        dims = tl.arange(0, VALUE_PADDED)[None, :]
        source = value + token * value_strides[0] + heads * value_strides[1] + dims
        target = value_cache + block * value_cache_strides[0] + inside * value_cache_strides[1]
        target += heads * value_cache_strides[2] + dims
        _copy(source, target, value_factor, (heads < KV_HEADS) & (dims < VALUE_DIM))


@triton.jit
def _copy(source, target, factor, mask):
    values = tl.load(source, mask=mask)
    tl.store(target, to_cache_dtype(values, target, factor), mask=mask)


@triton.jit
def _norm_and_rotate(
    source,  # [tile, 1], address of each head
    target,  # [tile, 1], address of each head
    is_head,
    weight,
    eps,
    cos,
    sin,
    factor,
    HAS_NORM: tl.constexpr,
    MOVES_REST: tl.constexpr,  # whether to store the elements that are not rotated
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST: tl.constexpr,
    REST_PADDED: tl.constexpr,
):
    dims = tl.arange(0, HALF_PADDED)[None, :]
    mask = is_head & (dims < HALF)
    first = tl.load(source + dims, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dims, mask=mask, other=0.0).to(tl.float32)
    rests = tl.arange(0, REST_PADDED)[None, :]
    rest_mask = is_head & (rests < REST)
    if (REST > 0) & MOVES_REST:
        rest = tl.load(source + 2 * HALF + rests, mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        total = tl.sum(first * first + second * second, 1)
        if REST > 0:
            total += tl.sum(rest * rest, 1)
        inverse = (1.0 / tl.sqrt(total / (2 * HALF + REST) + eps))[:, None]
        first = _scaled(first, inverse, weight + dims, dims < HALF, source)
        second = _scaled(second, inverse, weight + HALF + dims, dims < HALF, source)
        if REST > 0:
            rest = _scaled(rest, inverse, weight + 2 * HALF + rests, rests < REST, source)
    _store(target + dims, first * cos - second * sin, source, factor, mask)
    _store(target + HALF + dims, second * cos + first * sin, source, factor, mask)
    if (REST > 0) & MOVES_REST:
        _store(target + 2 * HALF + rests, rest, source, factor, rest_mask)


@triton.jit
def _scaled(values, inverse, weight, mask, source):
    """Normalised values, rounded to the type of ``source``."""
    scaled = values * inverse * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    return scaled.to(source.dtype.element_ty).to(tl.float32)


@triton.jit
def _store(target, values, source, factor, mask):
    rounded = values.to(source.dtype.element_ty)
    tl.store(target, to_cache_dtype(rounded, target, factor), mask=mask)
