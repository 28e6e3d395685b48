"""Copies pieces of memory that are given as arrays of addresses: one launch for any number."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_chunks"])
def copy_spans(
    sources,  # [spans] int64 addresses
    targets,  # [spans] int64 addresses
    sizes,  # [spans] int64, in words
    first_chunks,  # [spans] int64, chunks of the spans before each one
    chunk_spans,  # [chunks] int32, whose chunk it is
    num_chunks,
    WORD: tl.constexpr,  # bytes: 8 if all addresses and sizes are multiples of 16, else 1
    CHUNK: tl.constexpr,  # words per chunk
    WIDTH: tl.constexpr,  # words in flight per program
):
    """Programs take chunks in turn, so that few of them, on few processors, can move a lot."""
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        span = tl.load(chunk_spans + chunk)
        begin = (chunk - tl.load(first_chunks + span)) * CHUNK
        stop = tl.minimum(begin + CHUNK, tl.load(sizes + span))
        source = tl.load(sources + span)
        target = tl.load(targets + span)
        if WORD == 8:
            old = tl.multiple_of(source, 16).to(tl.pointer_type(tl.int64))
            new = tl.multiple_of(target, 16).to(tl.pointer_type(tl.int64))
        else:
            old = source.to(tl.pointer_type(tl.int8))
            new = target.to(tl.pointer_type(tl.int8))
        for at in range(begin, stop, WIDTH):
            words = at + tl.arange(0, WIDTH)
            mask = words < stop
            tl.store(new + words, tl.load(old + words, mask=mask), mask=mask)
