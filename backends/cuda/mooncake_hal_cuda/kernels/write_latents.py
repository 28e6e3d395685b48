"""Norms latents, rotates their rows and the queries, and stores the rows: one launch for all."""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.rope import angles_at, rotate_heads
from mooncake_hal_cuda.kernels.write_kv import as_kept


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
    latent_factor,  # one over the plane's scale; only for caches of a narrower type
    rope_factor,  # the same
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program: HEADS heads of one token's query; the token's last one: its two rows."""
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
    tl.store(target + dims, as_kept(scaled, target, factor), mask=is_dim)


@triton.jit
def _rotate(source, target, cos, sin, factor, HALF: tl.constexpr, PADDED: tl.constexpr):
    dims = tl.arange(0, PADDED)[None, :]
    is_dim = dims < HALF
    first = tl.load(source + dims, mask=is_dim, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
    turned = (first * cos - second * sin).to(source.dtype.element_ty)
    tl.store(target + dims, as_kept(turned, target, factor), mask=is_dim)
    turned = (second * cos + first * sin).to(source.dtype.element_ty)
    tl.store(target + HALF + dims, as_kept(turned, target, factor), mask=is_dim)
