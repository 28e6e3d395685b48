"""Causal grouped-head attention of prompts, and of chunks of prompts, over paged KV.

The query heads of a group share keys and values, so they are rows of one matrix: row r of a
sequence is head ``r % GROUP`` of its new token ``r // GROUP``. Softmax is computed online as in
FlashAttention-2 (Dao 2023, arXiv 2307.08691), in base 2.
"""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.attention_parts import (
    empty_softmax,
    load_rows,
    rows_of,
    store_rows,
    update_softmax,
)
from mooncake_hal_cuda.kernels.paged_cache import token_offsets


@triton.jit(do_not_specialize=["first", "table_stride"])
def prefill_attention(
    out,  # [tokens, HEADS, DIM], dense
    query,  # [tokens, HEADS, DIM]
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    query_start,
    first,  # the launch's first sequence
    table_stride,
    scale,  # of the scores, times log2(e) and the keys' KV scale
    value_scale,
    query_strides,  # (token, head)
    key_strides,  # (block, token, head)
    value_strides,  # (block, token, head)
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: some rows of one sequence and KV head, over their whole context."""
    # the last rows see most tokens and start first: otherwise the longest programs would run alone
    # at the end of the launch
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, sequence = tl.program_id(1), first + tl.program_id(2)
    is_row, tokens, heads, positions, _, common, seen = rows_of(
        query_start, context_lens, first, sequence, row_block, GROUP, ROWS
    )
    if seen == 0:
        return
    heads += kv_head * GROUP
    q = load_rows(query, is_row, tokens, heads, query_strides, DIM, DIM_PADDED)
    caches = (key_cache + kv_head * key_strides[2], value_cache + kv_head * value_strides[2])
    table = block_tables + sequence.to(tl.int64) * table_stride
    strides = (key_strides[0], key_strides[1], value_strides[0], value_strides[1])
    running = _attend_range(
        q, positions, scale, caches, strides, table, 0, seen, common,
        DIM, DIM_PADDED, BLOCK_SIZE, ROWS, TOKENS, PRECISION,
    )  # fmt: skip
    rows = tokens.to(tl.int64) * HEADS + heads
    store_rows(out, running, rows, is_row, value_scale, DIM, DIM_PADDED)


@triton.jit
def _attend_range(
    q,
    positions,
    scale,
    caches,  # of this KV head
    strides,
    table,
    start,
    stop,
    common,  # number of leading tokens that every row sees
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The rows' online softmax over the tokens [start, stop).

    ``start`` is always 0. Without it, Triton 3.7's code for sm_100 spills 8 bytes with heads of 64.
    """
    running = empty_softmax(ROWS, DIM_PADDED)
    whole = start + tl.maximum(tl.minimum(common, stop) - start, 0) // TOKENS * TOKENS
    for begin in range(start, whole, TOKENS):
        running = _attend(
            q, positions, scale, caches, strides, table, begin, stop, running,
            DIM, DIM_PADDED, BLOCK_SIZE, TOKENS, PRECISION, False,
        )  # fmt: skip
    for begin in range(whole, stop, TOKENS):
        running = _attend(
            q, positions, scale, caches, strides, table, begin, stop, running,
            DIM, DIM_PADDED, BLOCK_SIZE, TOKENS, PRECISION, True,
        )  # fmt: skip
    return running


@triton.jit
def _attend(
    q,
    positions,
    scale,
    caches,  # of this KV head
    strides,
    table,
    begin,
    stop,
    running,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add TOKENS tokens from ``begin`` on to the rows' online softmax.

    Without MASKED, all of them must lie before ``stop`` and be seen by every row.
    """
    k_at, v_at = token_offsets(table, begin, stop, strides, BLOCK_SIZE, TOKENS, MASKED)
    dims = tl.arange(0, DIM_PADDED)
    is_key, is_value = (dims < DIM)[:, None], (dims < DIM)[None, :]
    seen = begin + tl.arange(0, TOKENS)
    if MASKED:
        is_key &= (seen < stop)[None, :]
        is_value &= (seen < stop)[:, None]
    k = tl.load(caches[0] + k_at[None, :] + dims[:, None], mask=is_key, other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
    if MASKED:
        visible = (seen[None, :] <= positions[:, None]) & (seen < stop)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    v = tl.load(caches[1] + v_at[:, None] + dims[None, :], mask=is_value, other=0.0)
    return update_softmax(scores, v.to(q.dtype), running, PRECISION)
