"""Causal grouped-head attention over paged KV: decodes, prompts, and chunks of prompts.

The query heads of a group share keys and values, so they are rows of one matrix: row r of a
sequence is head ``r % GROUP`` of its new token ``r // GROUP``. Softmax is computed online as in
FlashAttention-2 (Dao 2023, arXiv 2307.08691), in base 2.

Half of the kernel's lines are its parameters, each of which Triton needs by name.
"""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.attention_parts import (
    empty_softmax,
    is_last_to_arrive,
    load_rows,
    merge_rows,
    rows_of,
    split_plan,
    splits_each,
    store_rows,
    store_weights,
    update_softmax,
)
from mooncake_hal_cuda.kernels.paged_cache import clamped_token_offsets, token_offsets


@triton.jit(do_not_specialize=["first", "splits", "programs", "least", "table_stride"])
def paged_attention(
    out,  # [tokens, heads, DIM], dense
    parts,  # float32 [tokens, splits, heads, DIM], dense: partial results of splits
    weights,  # float32 [tokens, splits, heads]: log2 of each split's sum of exponentials
    arrivals,  # int32 [sequences, kv heads, row blocks]: counters, zeros before and after
    query,  # [tokens, heads, DIM]
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    query_start,
    first,  # the launch's first sequence
    table_stride,
    scale,  # of the scores, times log2(e) and the keys' KV scale
    splits,  # capacity of ``parts`` and ``weights``, in splits per token
    programs,  # programs per row block; each computes consecutive splits
    least,  # least number of splits per program
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
    MERGED_ROWS: tl.constexpr,  # rows of a decode's block that may exist, as a power of two
    TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_AHEAD: tl.constexpr,  # whether the next kernel may be launched early, see ``kernels.gemv``
):
    """One program: some rows of one sequence and KV head, over their whole context or over some of
    its splits.

    Decodes begin with the batch's first sequence and have one token each. The last program of a row
    block to finish merges the splits of all of them, which saves a merge launch in every layer.
    """
    if IS_AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
    # the last rows see most tokens and start first: otherwise the longest programs would run alone
    # at the end of the launch
    row_block = (tl.num_programs(0) - 1 - tl.program_id(0)) // programs
    if IS_SPLIT and GROUP <= ROWS:
        row_block = 0  # the only row block, which the compiler can't infer
    turn = tl.program_id(0) % programs
    kv_head, sequence = tl.program_id(1), first + tl.program_id(2)
    is_row, tokens, heads, positions, context, common, seen = rows_of(
        query_start, context_lens, first, sequence, row_block, GROUP, ROWS
    )
    share, count = split_plan(context, seen, MIN_SPLIT, MAX_SPLITS, TOKENS, IS_SPLIT)
    each = splits_each(count, programs, least)
    split = turn * each
    if split >= count:
        return
    heads += kv_head * GROUP
    q = load_rows(query, is_row, tokens, heads, query_strides, DIM, DIM_PADDED)
    caches = (key_cache + kv_head * key_strides[2], value_cache + kv_head * value_strides[2])
    table = block_tables + sequence.to(tl.int64) * table_stride
    strides = (key_strides[0], key_strides[1], value_strides[0], value_strides[1])
    if IS_SPLIT:
        # one loop over all splits: with a loop per split, each would begin with an empty pipeline
        running = empty_softmax(ROWS, DIM_PADDED)
        stop = tl.minimum(seen, (split + each) * share)
        for begin in tl.range(split * share, stop, TOKENS, disable_licm=True):
            running = _attend_few(
                q, scale, caches, strides, table, begin, stop, running,
                DIM, DIM_PADDED, BLOCK_SIZE, TOKENS, PRECISION,
            )  # fmt: skip
            if begin + TOKENS >= tl.minimum((split + 1) * share, stop):
                at = (tl.program_id(2).to(tl.int64) * splits + split) * HEADS
                at += kv_head * GROUP + row_block * ROWS
                _store_split(
                    parts + at * DIM, weights + at, running, GROUP - row_block * ROWS, value_scale,
                    DIM, DIM_PADDED, ROWS,
                )  # fmt: skip
                running = empty_softmax(ROWS, DIM_PADDED)
                split += 1
        _merge(
            out, parts, weights, arrivals, context_lens, splits, programs, least,
            HEADS, GROUP, DIM, DIM_PADDED, MERGED_ROWS, ROWS, TOKENS, MIN_SPLIT, MAX_SPLITS,
        )  # fmt: skip
    else:
        running = _attend_range(
            q, positions, scale, caches, strides, table, 0, seen, common,
            DIM, DIM_PADDED, BLOCK_SIZE, ROWS, TOKENS, PRECISION,
        )  # fmt: skip
        rows = tokens.to(tl.int64) * HEADS + heads
        store_rows(out, running, rows, is_row, value_scale, DIM, DIM_PADDED)


@triton.jit
def _store_split(
    part,  # address of the result of the split's first row
    weight,  # address of the weight of the split's first row
    running,  # final state of the online softmax
    num_heads,  # number of heads from the first row on, each of which is a row
    value_scale,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store a split's results. The rows are recomputed to save registers; see ``_merge``."""
    rows = tl.arange(0, ROWS)
    store_rows(part, running, rows, rows < num_heads, value_scale, DIM, DIM_PADDED)
    store_weights(weight, running, rows, rows < num_heads)


@triton.jit
def _merge(
    out,
    parts,
    weights,
    arrivals,
    context_lens,
    splits,
    programs,
    least,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merge a row block's splits if its other programs have finished.

    Values that the caller has computed already are recomputed here: kept across the caller's loop,
    they would take registers from it.
    """
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    row_blocks = tl.num_programs(0) // programs
    row_block = (tl.num_programs(0) - 1 - tl.program_id(0)) // programs
    if GROUP <= ROWS:
        row_block = 0
    context = tl.load(context_lens + sequence)
    _, count = split_plan(context, context, MIN_SPLIT, MAX_SPLITS, TOKENS, True)
    counted = (sequence * tl.num_programs(1) + kv_head) * row_blocks + row_block
    busy = tl.cdiv(count, splits_each(count, programs, least))  # number of programs with splits
    if is_last_to_arrive(arrivals + counted, busy):
        head = kv_head * GROUP + row_block * ROWS
        row = sequence.to(tl.int64) * HEADS + head
        part = sequence.to(tl.int64) * splits * HEADS + head
        is_row = tl.arange(0, MERGED_ROWS) < GROUP - row_block * ROWS
        merge_rows(
            out + row * DIM, parts + part * DIM, weights + part, count, is_row,
            HEADS, DIM, DIM_PADDED, MERGED_ROWS,
        )  # fmt: skip


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
    """The rows' online softmax over the tokens [start, stop)."""
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


@triton.jit
def _attend_few(
    q,  # queries of the sequence's last token, which sees the whole context
    scale,
    caches,
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
    """``_attend`` for a decode, without a load mask for tokens, which would cost registers; see
    ``clamped_token_offsets``."""
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
