"""Causal attention over paged latents, in the absorbed form of DeepSeek-V2 (arXiv 2405.04434).

All heads share the keys (latent and rope together) and the values (the latent again): the heads
of a sequence's new tokens are rows of one matrix, row r being head ``r % HEADS`` of token
``r // HEADS``. A latent is read once, for its score and for its share of the sum.
"""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.paging import place
from mooncake_hal_cuda.kernels.softmax import absorb
from mooncake_hal_cuda.kernels.splitting import split_tokens


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
    splits,  # per row block, of which a short context leaves some idle
    scale,  # with log2(e)
    table_stride,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    latent_block_stride,
    latent_token_stride,
    rope_block_stride,
    rope_token_stride,
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
    """One program: some rows of one sequence, over all it sees or over one split of it."""
    sequence = first + tl.program_id(1)
    row_block = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    begin_token = tl.load(query_start + sequence)
    new_tokens = tl.load(query_start + sequence + 1) - begin_token
    before = begin_token - tl.load(query_start + first)  # query rows of this launch before it
    context = tl.load(context_lens + sequence)
    if row_block * ROWS >= new_tokens * HEADS:
        return

    rows = row_block * ROWS + tl.arange(0, ROWS)
    is_row = rows < new_tokens * HEADS
    tokens = before + rows // HEADS
    heads = rows % HEADS
    positions = context - new_tokens + rows // HEADS
    dims = tl.arange(0, LATENT_PADDED)
    is_dim = dims < LATENT
    rope_dims = tl.arange(0, ROPE_PADDED)
    is_rope = rope_dims < ROPE

    start = 0
    stop = tl.minimum(context, context - new_tokens + ((row_block + 1) * ROWS - 1) // HEADS + 1)
    if IS_SPLIT:
        share = split_tokens(context, MIN_SPLIT, MAX_SPLITS, TOKENS)
        start = split * share
        stop = tl.minimum(stop, start + share)
        if start >= stop:
            return

    query += tokens.to(tl.int64)[:, None] * query_token_stride + heads[:, None] * query_head_stride
    q = tl.load(query + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    is_used = is_row[:, None] & is_rope[None, :]
    q_rope = tl.load(query + LATENT + rope_dims[None, :], mask=is_used, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, LATENT_PADDED], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride

    for begin in range(start, stop, TOKENS):
        latent_at, rope_at = place(
            table, begin, stop, latent_block_stride, latent_token_stride, rope_block_stride,
            rope_token_stride, BLOCK_SIZE, TOKENS, True,
        )  # fmt: skip
        seen = begin + tl.arange(0, TOKENS)
        is_token = seen < stop
        at = latent_at[:, None] + dims[None, :]
        is_there = is_token[:, None] & is_dim[None, :]
        latent = tl.load(latent_cache + at, mask=is_there, other=0.0)
        rope_at = rope_at[None, :] + rope_dims[:, None]
        is_rope_there = is_token[None, :] & is_rope[:, None]
        rope = tl.load(rope_cache + rope_at, mask=is_rope_there, other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rope, rope, scores, input_precision=PRECISION) * scale
        visible = (seen[None, :] <= positions[:, None]) & is_token[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        sums, top, total = absorb(scores, latent, sums, top, total, PRECISION)

    result = sums / total[:, None]
    mask = is_row[:, None] & is_dim[None, :]
    if IS_SPLIT:
        part = (tokens.to(tl.int64) * HEADS + heads) * splits + split
        tl.store(weights + part, top + tl.log2(total), mask=is_row)
        tl.store(out + part[:, None] * LATENT + dims[None, :], result, mask=mask)
    else:
        at = tokens.to(tl.int64)[:, None] * out_token_stride + heads[:, None] * out_head_stride
        tl.store(out + at + dims[None, :], result.to(out.dtype.element_ty), mask=mask)
