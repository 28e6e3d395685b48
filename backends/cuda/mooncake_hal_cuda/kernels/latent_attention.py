"""Causal attention over paged latents, in the absorbed form of DeepSeek-V2 (arXiv 2405.04434).

All heads share the keys (latent and rope together) and the values (the latent again): the heads
of a sequence's new tokens are rows of one matrix, row r being head ``r % HEADS`` of token
``r // HEADS``. A latent is read once, for its score and for its share of the sum.
"""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.paging import place_present
from mooncake_hal_cuda.kernels.rows import load_rows, rows_of, store_rows
from mooncake_hal_cuda.kernels.softmax import absorb, nothing_yet
from mooncake_hal_cuda.kernels.splitting import split_plan


@triton.jit(do_not_specialize=["first", "splits", "table_stride"])
def latent_attention(
    out,  # [tokens, HEADS, LATENT]; of splits: float32 [tokens, HEADS, splits, LATENT], dense
    weights,  # of splits: float32 [tokens, HEADS, splits], log2 of each one's sum of exponentials
    query,  # [tokens, HEADS, LATENT + ROPE]
    latent_cache,
    rope_cache,
    block_tables,
    context_lens,
    query_start,
    first,  # of the sequences that this launch is about
    table_stride,
    scale,  # with log2(e) and the latents' own
    splits,  # per row block, of which a short context leaves some idle
    latent_scale,
    out_strides,  # of tokens and heads
    query_strides,  # the same
    strides,  # of blocks and tokens in the latents, and of both in the rope rows
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
    """One program: some rows of one sequence, over all it sees or over one split of it.

    Row blocks of a split are neighbours: what one reads, the next one finds in the L2 cache.
    """
    row_blocks = tl.num_programs(0) // splits
    row_block, split = tl.program_id(0) % row_blocks, tl.program_id(0) // row_blocks
    sequence = first + tl.program_id(1)
    is_row, tokens, heads, positions, context, _, seen = rows_of(
        query_start, context_lens, first, sequence, row_block, HEADS, ROWS
    )
    share, count = split_plan(context, seen, MIN_SPLIT, MAX_SPLITS, TOKENS, IS_SPLIT)
    if split >= count:
        return
    stop = tl.minimum(seen, (split + 1) * share)
    q = load_rows(query, is_row, tokens, heads, query_strides, LATENT, LATENT_PADDED)
    q_rope = load_rows(query + LATENT, is_row, tokens, heads, query_strides, ROPE, ROPE_PADDED)
    table = block_tables + sequence.to(tl.int64) * table_stride
    limits = tl.minimum(positions + 1, stop)
    running = nothing_yet(ROWS, LATENT_PADDED)
    for begin in range(split * share, stop, TOKENS):
        running = _attend(
            (q, q_rope), limits, scale, (latent_cache, rope_cache), strides, table, begin, stop,
            running, LATENT, ROPE, BLOCK_SIZE, TOKENS, PRECISION,
        )  # fmt: skip
    store_rows(
        out, weights, running, is_row, tokens, heads, out_strides, latent_scale, split, splits,
        HEADS, LATENT, LATENT_PADDED, IS_SPLIT,
    )  # fmt: skip


@triton.jit
def _attend(
    queries,  # what meets the latents, and what meets the rope rows
    limits,  # of each row: the first token that it does not see
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
):
    """Take TOKENS tokens from ``begin`` on into the rows' running softmax.

    Loads have no mask for tokens, whose predicates would take the last registers: beyond ``stop``
    the last token is read again, and not counted.
    """
    q, q_rope = queries
    latent_at, rope_at = place_present(table, begin, stop, strides, BLOCK_SIZE, TOKENS)
    dims, rope_dims = tl.arange(0, q.shape[1]), tl.arange(0, q_rope.shape[1])
    latent_at = caches[0] + latent_at[:, None] + dims[None, :]
    rope_at = caches[1] + rope_at[None, :] + rope_dims[:, None]
    if q.shape[1] == LATENT:
        latent = tl.load(latent_at).to(q.dtype)
    else:
        latent = tl.load(latent_at, mask=(dims < LATENT)[None, :], other=0.0).to(q.dtype)
    if q_rope.shape[1] == ROPE:
        rope = tl.load(rope_at).to(q.dtype)
    else:
        rope = tl.load(rope_at, mask=(rope_dims < ROPE)[:, None], other=0.0).to(q.dtype)
    scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
    scores = tl.dot(q_rope, rope, scores, input_precision=PRECISION) * scale
    is_seen = (begin + tl.arange(0, TOKENS))[None, :] < limits[:, None]
    scores = tl.where(is_seen, scores, float("-inf"))
    return absorb(scores, latent, running, PRECISION)
