"""Causal attention over paged latents, in the absorbed form of DeepSeek-V2 (arXiv 2405.04434).

All heads share the keys (latent and rope together) and the values (the latent again), so the heads
of a sequence's new tokens are rows of one matrix: row r is head ``r % HEADS`` of token
``r // HEADS``. A latent is read once and used as key and as value.

Half of the kernel's lines are its parameters, each of which Triton needs by name.
"""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.attention_parts import (
    empty_softmax,
    has_one_split,
    load_rows,
    rows_of,
    split_plan,
    split_tokens,
    store_rows,
    store_weights,
    update_softmax,
)
from mooncake_hal_cuda.kernels.paged_cache import clamped_token_offsets


@triton.jit(do_not_specialize=["first", "splits", "programs", "table_stride"])
def latent_attention(
    out,  # [tokens, HEADS, LATENT] dense
    parts,  # float32 [tokens, splits, HEADS, LATENT] dense: results of splits, unless there is one
    weights,  # float32 [tokens, splits, HEADS]: log2 of each split's sum of exponentials
    query,  # [tokens, HEADS, LATENT + ROPE]
    latent_cache,
    rope_cache,
    block_tables,
    context_lens,
    query_start,
    first,  # the launch's first sequence
    table_stride,
    scale,  # of the scores, times log2(e) and the latents' KV scale
    splits,  # capacity of ``parts`` and ``weights``, in splits per token
    programs,  # programs per row block; program i computes splits i, i + programs, ...
    latent_scale,
    query_strides,  # (token, head)
    strides,  # (block, token) of the latents, then (block, token) of the rope rows
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: some rows of one sequence, over their whole context or over some of its splits.

    The programs of one split's row blocks are neighbours, so that they share its latents in L2.
    """
    row_blocks = tl.num_programs(0) // programs
    row_block, turn = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    sequence = first + tl.program_id(1)
    is_row, tokens, heads, positions, context, common, seen = rows_of(
        query_start, context_lens, first, sequence, row_block, HEADS, ROWS
    )
    share, count = split_plan(context, seen, MIN_SPLIT, MAX_SPLITS, TOKENS, IS_SPLIT)
    if turn >= count:
        return
    q = load_rows(query, is_row, tokens, heads, query_strides, LATENT, LATENT_PADDED)
    q_rope = load_rows(query + LATENT, is_row, tokens, heads, query_strides, ROPE, ROPE_PADDED)
    table = block_tables + sequence.to(tl.int64) * table_stride
    caches = (latent_cache, rope_cache)
    if IS_SPLIT:
        for split in tl.range(turn, count, programs, disable_licm=True):
            context = tl.load(context_lens + sequence)  # reloaded to save registers, see _store
            share = split_tokens(context, MIN_SPLIT, MAX_SPLITS, TOKENS)
            running = _attend_range(
                (q, q_rope), positions, context, scale, caches, strides, table, split * share,
                tl.minimum(context, (split + 1) * share),
                LATENT, ROPE, BLOCK_SIZE, TOKENS, PRECISION, False,
            )  # fmt: skip
            _store(
                out, parts, weights, running, query_start, first, sequence, row_block,
                splits, split, has_one_split(context, MIN_SPLIT, MAX_SPLITS),
                latent_scale, HEADS, LATENT, LATENT_PADDED, ROWS, IS_SPLIT,
            )  # fmt: skip
    else:
        running = _attend_range(
            (q, q_rope), positions, common, scale, caches, strides, table, 0, seen,
            LATENT, ROPE, BLOCK_SIZE, TOKENS, PRECISION, True,
        )  # fmt: skip
        _store(
            out, parts, weights, running, query_start, first, sequence, row_block,
            1, 0, True, latent_scale, HEADS, LATENT, LATENT_PADDED, ROWS, IS_SPLIT,
        )  # fmt: skip


@triton.jit
def _store(
    out,
    parts,
    weights,
    running,
    query_start,
    first,
    sequence,
    row_block,
    splits,
    split,
    is_whole,  # whether the context has a single split
    latent_scale,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Store a row block's results, for the whole context or for one split.

    The addresses are recomputed for each split: kept across its loop, they would take the last
    registers.
    """
    begin = tl.load(query_start + sequence)
    rows = tl.arange(0, ROWS)
    if HEADS % ROWS == 0:  # a block has all of its rows, or none and no splits
        is_row = tl.full([ROWS], True, tl.int1)
    else:
        heads = (tl.load(query_start + sequence + 1) - begin) * HEADS
        is_row = rows < heads - row_block * ROWS
    token = tl.program_id(1) if IS_SPLIT else begin - tl.load(query_start + first)
    if is_whole:
        at = (token * HEADS + row_block * ROWS).to(tl.int64)
        store_rows(out + at * LATENT, running, rows, is_row, latent_scale, LATENT, LATENT_PADDED)
    else:
        at = ((token * splits + split) * HEADS + row_block * ROWS).to(tl.int64)
        store_rows(parts + at * LATENT, running, rows, is_row, latent_scale, LATENT, LATENT_PADDED)
        store_weights(weights + at, running, rows, is_row)


@triton.jit
def _attend_range(
    queries,  # (queries for the latents, queries for the rope rows)
    positions,
    common,  # number of leading tokens that all rows see
    scale,
    caches,
    strides,
    table,
    start,
    stop,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """The rows' online softmax over the tokens [start, stop).

    Without IS_CAUSAL, every row sees all of these tokens.
    """
    running = empty_softmax(queries[0].shape[0], queries[0].shape[1])
    for begin in range(start, stop, TOKENS):
        running = _attend(
            queries, positions, common, scale, caches, strides, table, begin, stop, running,
            LATENT, ROPE, BLOCK_SIZE, TOKENS, PRECISION, IS_CAUSAL,
        )  # fmt: skip
    return running


@triton.jit
def _attend(
    queries,
    positions,
    common,
    scale,
    caches,
    strides,
    table,
    begin,
    stop,
    running,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Add TOKENS tokens from ``begin`` on to the rows' online softmax.

    Loads have no mask for tokens, whose predicates would take the last registers. Beyond ``stop``
    the last token is read again, and its score is masked.

    The scores are two products, and masking them is behind a branch, for a reason: where Triton
    sees that one product feeds another one, every group of four warps computes all of the first. It
    does not look past a branch, so that here two groups compute half of the scores each.

    Latents of a narrower type are loaded twice, the second time from the L1 or L2 cache: a tile
    that is widened once for both products would pass through registers.
    """
    q, q_rope = queries
    latent_at, rope_at = clamped_token_offsets(table, begin, stop, strides, BLOCK_SIZE, TOKENS)
    dims, rope_dims = tl.arange(0, q.shape[1]), tl.arange(0, q_rope.shape[1])
    rope_at = caches[1] + rope_at[None, :] + rope_dims[:, None]
    values_at = caches[0] + latent_at[:, None] + dims[None, :]
    keys_at = caches[0] + latent_at[None, :] + dims[:, None]
    if q.shape[1] == LATENT:
        values = tl.load(values_at)
    else:
        values = tl.load(values_at, mask=(dims < LATENT)[None, :], other=0.0)
    if values.dtype == q.dtype:
        keys = tl.trans(values)  # the same tile in shared memory
    elif q.shape[1] == LATENT:
        keys = tl.load(keys_at)
    else:
        keys = tl.load(keys_at, mask=(dims < LATENT)[:, None], other=0.0)
    if q_rope.shape[1] == ROPE:
        rope = tl.load(rope_at).to(q.dtype)
    else:
        rope = tl.load(rope_at, mask=(rope_dims < ROPE)[:, None], other=0.0).to(q.dtype)
    scores = tl.dot(q, keys.to(q.dtype), input_precision=PRECISION) * scale
    scores += tl.dot(q_rope, rope, input_precision=PRECISION) * scale
    seen = begin + tl.arange(0, TOKENS)
    if begin + TOKENS > tl.minimum(common, stop):
        is_seen = (seen < stop)[None, :]
        if IS_CAUSAL:
            is_seen &= seen[None, :] <= positions[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
    return update_softmax(scores, values.to(q.dtype), running, PRECISION)
