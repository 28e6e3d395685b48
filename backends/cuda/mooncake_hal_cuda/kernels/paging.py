"""Where tokens lie in a paged cache of any strides."""

import triton
import triton.language as tl


@triton.jit
def place(
    table,
    begin,
    stop,
    strides,  # of blocks and tokens in the first plane, and of both in the second
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Offsets of TOKENS tokens from ``begin`` on in both planes: [TOKENS] int64 each."""
    if BLOCK_SIZE % TOKENS == 0:  # all in one block
        block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
        inside = begin % BLOCK_SIZE + tl.arange(0, TOKENS)
    else:
        seen = begin + tl.arange(0, TOKENS)
        if MASKED:
            block = tl.load(table + seen // BLOCK_SIZE, mask=seen < stop, other=0).to(tl.int64)
        else:
            block = tl.load(table + seen // BLOCK_SIZE).to(tl.int64)
        inside = seen % BLOCK_SIZE
    first = block * strides[0] + inside * strides[1]
    return first, block * strides[2] + inside * strides[3]


@triton.jit
def place_present(table, begin, stop, strides, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """The same; for those from ``stop`` on, which may never have been written, the last before."""
    seen = tl.minimum(begin + tl.arange(0, TOKENS), stop - 1)
    if BLOCK_SIZE % TOKENS == 0:
        block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(table + seen // BLOCK_SIZE).to(tl.int64)
    inside = seen % BLOCK_SIZE
    first = block * strides[0] + inside * strides[1]
    return first, block * strides[2] + inside * strides[3]
