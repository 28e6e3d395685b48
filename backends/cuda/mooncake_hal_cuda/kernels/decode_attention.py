"""Grouped-head attention of decodes over paged KV: one new token per sequence.

The query heads of a group share keys and values, so they are rows of one matrix. Softmax is
computed online as in FlashAttention-2 (Dao 2023, arXiv 2307.08691), in base 2. Long contexts are
divided into splits, as in Flash-Decoding.
"""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.attention_parts import (
    add_split,
    empty_softmax,
    is_last_to_arrive,
    merge_rows,
    split_plan,
    split_result,
    splits_each,
    store_merged,
    update_softmax,
)
from mooncake_hal_cuda.kernels.early_launch import await_predecessor
from mooncake_hal_cuda.kernels.paged_cache import clamped_token_offsets


@triton.jit(do_not_specialize=["splits", "programs", "least", "table_stride"])
def decode_attention(
    out,  # [sequences, HEADS, DIM], dense
    parts,  # float32 [sequences, splits, HEADS, DIM], dense: partial results of splits
    weights,  # float32 [sequences, splits, HEADS]: log2 of each split's sum of exponentials
    arrivals,  # int32 [sequences, kv heads, row blocks]: counters, zeros before and after
    query,  # [sequences, HEADS, DIM]
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    table_stride,
    scale,  # of the scores, times log2(e) and the keys' KV scale
    splits,  # capacity of ``parts`` and ``weights``, in splits per sequence
    programs,  # programs per row block; each computes consecutive splits
    least,  # least number of splits per program
    value_scale,
    query_strides,  # (sequence, head)
    key_strides,  # (block, token, head)
    value_strides,  # (block, token, head)
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT_ROWS: tl.constexpr,  # rows of a block that may exist, as a power of two
    TOKENS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One program: the rows of one sequence and KV head, over all splits of their context or over
    some of them.

    A program with all splits merges them in registers. Otherwise splits are stored, and the last
    program of a row block to finish merges them, which saves a merge launch in every layer. Both
    add them up in the same order: the result does not depend on how splits are shared.
    """
    await_predecessor(IS_EARLY)
    row_block, kv_head = tl.program_id(0), tl.program_id(1)
    if GROUP <= ROWS:
        row_block = 0  # the only row block, which the compiler can't infer
    # the programs that may have no split come last, where other programs hide their launches
    sequences = tl.num_programs(2) // programs
    sequence, turn = tl.program_id(2) % sequences, tl.program_id(2) // sequences
    context = tl.load(context_lens + sequence)
    share, count = split_plan(context, context, MIN_SPLIT, MAX_SPLITS, TOKENS, True)
    each = splits_each(count, programs, least)
    split = turn * each
    if split >= count:
        return
    row, head = row_block * ROWS, kv_head * GROUP + row_block * ROWS
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    query += sequence.to(tl.int64) * query_strides[0] + (head + rows)[:, None] * query_strides[1]
    is_query = (rows < GROUP - row)[:, None] & (dims < DIM)[None, :]
    q = tl.load(query + dims[None, :], mask=is_query, other=0.0)
    caches = (key_cache + kv_head * key_strides[2], value_cache + kv_head * value_strides[2])
    table = block_tables + sequence.to(tl.int64) * table_stride
    strides = (key_strides[0], key_strides[1], value_strides[0], value_strides[1])
    first = (sequence.to(tl.int64) * splits) * HEADS + head  # index of the first split's first row
    has_all = each >= count
    merged, running = empty_softmax(KEPT_ROWS, DIM_PADDED), empty_softmax(ROWS, DIM_PADDED)
    # one loop over all splits: with a loop per split, each would begin with an empty pipeline
    stop = tl.minimum(context, (split + each) * share)
    for begin in tl.range(split * share, stop, TOKENS, disable_licm=True):
        running = _attend(
            q, scale, caches, strides, table, begin, stop, running,
            DIM, DIM_PADDED, BLOCK_SIZE, TOKENS, PRECISION,
        )  # fmt: skip
        if begin + TOKENS >= tl.minimum((split + 1) * share, stop):
            part, weight = split_result(running, value_scale, KEPT_ROWS)
            if has_all:
                merged = add_split(merged, part, weight)
            else:
                at = first + split * HEADS
                _store_split(parts + at * DIM, weights + at, part, weight, GROUP - row, DIM)
            running = empty_softmax(ROWS, DIM_PADDED)
            split += 1
    out += (sequence.to(tl.int64) * HEADS + head) * DIM
    is_row = tl.arange(0, KEPT_ROWS) < GROUP - row
    if has_all:
        store_merged(out, merged, is_row, DIM)
        return
    busy = tl.cdiv(count, each)  # number of programs with splits
    counted = (sequence * tl.num_programs(1) + kv_head) * tl.num_programs(0) + row_block
    if is_last_to_arrive(arrivals + counted, busy):
        merge_rows(out, parts + first * DIM, weights + first, count, is_row, HEADS, DIM, DIM_PADDED)


@triton.jit
def _store_split(
    parts,  # address of the result of the split's first row
    weights,  # address of the weight of the split's first row
    part,  # [KEPT_ROWS, DIM_PADDED]
    weight,  # [KEPT_ROWS]
    num_rows,  # number of rows that exist
    DIM: tl.constexpr,
):
    rows, dims = tl.arange(0, part.shape[0]), tl.arange(0, part.shape[1])
    mask = (rows < num_rows)[:, None] & (dims < DIM)[None, :]
    tl.store(parts + rows[:, None] * DIM + dims[None, :], part, mask=mask)
    tl.store(weights + rows, weight, mask=rows < num_rows)


@triton.jit
def _attend(
    q,
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
):
    """Add TOKENS tokens from ``begin`` on to the rows' online softmax, without a load mask for
    tokens, which would cost registers; see ``clamped_token_offsets``."""
    k_at, v_at = clamped_token_offsets(table, begin, stop, strides, BLOCK_SIZE, TOKENS)
    dims = tl.arange(0, DIM_PADDED)
    k_at = caches[0] + k_at[None, :] + dims[:, None]
    v_at = caches[1] + v_at[:, None] + dims[None, :]
    if DIM == DIM_PADDED:
        k, v = tl.load(k_at), tl.load(v_at)
    else:
        k = tl.load(k_at, mask=(dims < DIM)[:, None], other=0.0)
        v = tl.load(v_at, mask=(dims < DIM)[None, :], other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
    is_seen = begin + tl.arange(0, TOKENS) < stop
    scores = tl.where(is_seen[None, :], scores, float("-inf"))
    return update_softmax(scores, v.to(q.dtype), running, PRECISION)
