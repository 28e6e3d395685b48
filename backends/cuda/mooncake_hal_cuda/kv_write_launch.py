"""Launches the kernel that rotates queries and keys and writes KV, between a layer's QKV projection
and its attention."""

from __future__ import annotations

from torch import Tensor

from mooncake_hal.rope_writes import KVRows
from mooncake_hal_cuda.attention_launch import dense_rows
from mooncake_hal_cuda.kernels.rope_write_kernel import rope_and_write_kv
from mooncake_hal_cuda.launch_tuning import Tuning, power_of_two

_ROPE_ELEMENTS = 2048


def heads_together(heads: int, half: int) -> int:
    """The number of heads that one program rotates, a power of two.

    Args:
        heads: number of heads.
        half: half the number of rotated elements per head.
    """
    return max(1, min(power_of_two(heads), _ROPE_ELEMENTS // power_of_two(half)))


def launch_rope_writes(
    query: Tensor,  # [tokens, heads, head_dim], its last dimension dense
    rows: KVRows,
    caches: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    kv_scales: tuple[float, float],
    tuning: Tuning,
) -> None:
    """Normalise and rotate queries in place, and write normalised and rotated keys, and values, to
    the cache."""
    key, value, norms = dense_rows(rows.key), dense_rows(rows.value), rows.norms
    (tokens, heads, dim), kv_heads = query.shape, key.shape[1]
    half, value_dim = rows.cos_sin.shape[1] // 2, value.shape[2]
    rest = dim - 2 * half
    width = max(half, rest, -(-value_dim // 2))
    of_query, of_key = heads_together(heads, width), heads_together(kv_heads, width)
    query_tiles = -(-heads // of_query)
    rope_and_write_kv[(tokens, query_tiles + -(-kv_heads // of_key))](
        query,
        key,
        value,
        *caches,
        query if norms is None else norms.query.contiguous(),
        key if norms is None else norms.key.contiguous(),
        0.0 if norms is None else norms.eps,
        rows.positions,
        rows.cos_sin.contiguous(),
        slot_mapping,
        query.stride()[:2],
        key.stride()[:2],
        value.stride()[:2],
        caches[0].stride()[:3],
        caches[1].stride()[:3],
        *(1.0 / scale for scale in kv_scales),
        HAS_NORMS=norms is not None,
        QUERY_TILES=query_tiles,
        QUERY_HEADS=heads,
        QUERY_TILE=of_query,
        KV_HEADS=kv_heads,
        KV_TILE=of_key,
        HALF=half,
        HALF_PADDED=power_of_two(half),
        REST=rest,
        REST_PADDED=power_of_two(rest),
        VALUE_DIM=value_dim,
        VALUE_PADDED=power_of_two(value_dim),
        BLOCK_SIZE=caches[0].shape[1],
        IS_EARLY=tuning.has_early_launches,
        num_warps=4,
        **tuning.early_launch(tokens),
    )
