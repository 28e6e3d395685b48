"""Copy kernels: whole KV blocks, and pieces of memory by address."""

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
    HAS_SOURCE_IDS: tl.constexpr,  # otherwise block i is at index i
    HAS_TARGET_IDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS rows of one block. A row is one head of one token."""
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


@triton.jit(do_not_specialize=["num_chunks"])
def copy_spans(
    sources,  # [spans] int64 addresses
    targets,  # [spans] int64 addresses
    sizes,  # [spans] int64, in words
    first_chunks,  # [spans] int64, index of each span's first chunk
    chunk_spans,  # [chunks] int32, the span of each chunk
    num_chunks,
    WORD: tl.constexpr,  # bytes: 8 if all addresses and sizes are multiples of 16, else 1
    CHUNK: tl.constexpr,  # words per chunk
    WIDTH: tl.constexpr,  # words in flight per program
):
    """Copy all spans. Programs take chunks in turn, so that a few programs, which occupy few
    processors, can copy any amount."""
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        span = tl.load(chunk_spans + chunk)
        begin = (chunk - tl.load(first_chunks + span)) * CHUNK
        stop = tl.minimum(begin + CHUNK, tl.load(sizes + span))
        source = tl.load(sources + span)
        target = tl.load(targets + span)
        if WORD == 8:
            old = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
            new = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
            # otherwise the mask could end within 16 bytes, and accesses would have 8 bytes
            stop = tl.multiple_of(stop, 2)
        else:
            old = source.to(tl.pointer_type(tl.int8))
            new = target.to(tl.pointer_type(tl.int8))
        for at in range(begin, stop, WIDTH):
            words = at + tl.arange(0, WIDTH)
            mask = words < stop
            tl.store(new + words, tl.load(old + words, mask=mask), mask=mask)
