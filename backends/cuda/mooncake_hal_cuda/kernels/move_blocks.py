"""Moves whole KV blocks: inside a cache, out of it into staging, and back."""

import triton
import triton.language as tl


@triton.jit
def move_blocks(
    source,
    target,
    source_ids,
    target_ids,
    source_block_stride,
    source_token_stride,
    source_head_stride,
    target_block_stride,
    target_token_stride,
    target_head_stride,
    HAS_SOURCE_IDS: tl.constexpr,  # else block i lies at i
    HAS_TARGET_IDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS rows of one block, a row being one head of one token."""
    old = tl.program_id(0).to(tl.int64)
    new = old
    if HAS_TARGET_IDS:
        new = tl.load(target_ids + old)
    if HAS_SOURCE_IDS:
        old = tl.load(source_ids + old)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tokens = (rows // HEADS)[:, None]
    heads = (rows % HEADS)[:, None]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    mask = (rows < BLOCK_SIZE * HEADS)[:, None] & (dims < DIM)
    source += old * source_block_stride + tokens * source_token_stride + heads * source_head_stride
    target += new * target_block_stride + tokens * target_token_stride + heads * target_head_stride
    tl.store(target + dims, tl.load(source + dims, mask=mask), mask=mask)
