"""Stores new keys and values in their slots of a paged cache of any strides."""

import triton
import triton.language as tl


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
    key_factor,  # one over the plane's scale; only for caches of a narrower type
    value_factor,  # the same
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
    tl.store(target + heads * target_stride + dims, as_kept(values, target, factor), mask=mask)


@triton.jit
def as_kept(values, cache, factor):
    """Values in the cache's type."""
    if cache.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32) * factor, -448.0, 448.0).to(tl.float8e4nv)
    return values
