"""Causal attention with grouped heads over paged KV: decodes, prompts, and chunks of prompts.

The query heads of a group share keys and values, so they are rows of one matrix: row r of a
sequence is head ``r % GROUP`` of its new token ``r // GROUP``. Softmax is carried along as in
FlashAttention-2 (Dao 2023, arXiv 2307.08691), in base 2.
"""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.paging import place
from mooncake_hal_cuda.kernels.softmax import absorb
from mooncake_hal_cuda.kernels.splitting import split_tokens


@triton.jit(do_not_specialize=["first", "splits", "table_stride"])
def paged_attention(
    out,  # [tokens, heads, DIM]; of splits: float32 [tokens, heads, splits, DIM], dense
    weights,  # of splits: float32 [tokens, heads, splits], log2 of each one's sum of exponentials
    query,  # [tokens, heads, DIM]
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    query_start,
    first,  # of the sequences that this launch is about
    splits,  # per row block, of which a short context leaves some idle
    scale,  # with log2(e)
    table_stride,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: some rows of one sequence and kv head, over all it sees or one split of it."""
    sequence = first + tl.program_id(2)
    kv_head = tl.program_id(1)
    row_block = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    begin_token = tl.load(query_start + sequence)
    new_tokens = tl.load(query_start + sequence + 1) - begin_token
    before = begin_token - tl.load(query_start + first)  # query rows of this launch before it
    context = tl.load(context_lens + sequence)
    if row_block * ROWS >= new_tokens * GROUP:
        return

    rows = row_block * ROWS + tl.arange(0, ROWS)
    is_row = rows < new_tokens * GROUP
    tokens = before + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    positions = context - new_tokens + rows // GROUP
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < DIM

    start = 0
    stop = tl.minimum(context, context - new_tokens + ((row_block + 1) * ROWS - 1) // GROUP + 1)
    if IS_SPLIT:
        share = split_tokens(context, MIN_SPLIT, MAX_SPLITS, TOKENS)
        start = split * share
        stop = tl.minimum(stop, start + share)
        if start >= stop:
            return
    # what the first row sees, all rows see
    seen_by_all = context - new_tokens + (row_block * ROWS) // GROUP + 1
    whole = start + tl.maximum(tl.minimum(seen_by_all, stop) - start, 0) // TOKENS * TOKENS

    at = tokens.to(tl.int64)[:, None] * query_token_stride + heads[:, None] * query_head_stride
    q = tl.load(query + at + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    key_cache += kv_head * key_head_stride
    value_cache += kv_head * value_head_stride
    table = block_tables + sequence.to(tl.int64) * table_stride

    for begin in range(start, whole, TOKENS):
        k_at, v_at = place(
            table, begin, stop, key_block_stride, key_token_stride, value_block_stride,
            value_token_stride, BLOCK_SIZE, TOKENS, False,
        )  # fmt: skip
        k = tl.load(key_cache + k_at[None, :] + dims[:, None], mask=is_dim[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        v = tl.load(value_cache + v_at[:, None] + dims[None, :], mask=is_dim[None, :], other=0.0)
        sums, top, total = absorb(scores, v, sums, top, total, PRECISION)

    for begin in range(whole, stop, TOKENS):
        k_at, v_at = place(
            table, begin, stop, key_block_stride, key_token_stride, value_block_stride,
            value_token_stride, BLOCK_SIZE, TOKENS, True,
        )  # fmt: skip
        seen = begin + tl.arange(0, TOKENS)
        is_token = seen < stop
        is_key = is_token[None, :] & is_dim[:, None]
        k = tl.load(key_cache + k_at[None, :] + dims[:, None], mask=is_key, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        visible = (seen[None, :] <= positions[:, None]) & is_token[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        is_value = is_token[:, None] & is_dim[None, :]
        v = tl.load(value_cache + v_at[:, None] + dims[None, :], mask=is_value, other=0.0)
        sums, top, total = absorb(scores, v, sums, top, total, PRECISION)

    result = sums / total[:, None]
    mask = is_row[:, None] & is_dim[None, :]
    if IS_SPLIT:
        part = (tokens.to(tl.int64) * HEADS + heads) * splits + split
        tl.store(weights + part, top + tl.log2(total), mask=is_row)
        tl.store(out + part[:, None] * DIM + dims[None, :], result, mask=mask)
    else:
        at = tokens.to(tl.int64)[:, None] * out_token_stride + heads[:, None] * out_head_stride
        tl.store(out + at + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
