"""Softmax that is carried along as more tokens come, in base 2."""

import triton
import triton.language as tl


@triton.jit
def nothing_yet(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The running softmax of no tokens: weighted sums of values, largest score, sum of weights."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS, DIM], tl.float32), top, tl.zeros([ROWS], tl.float32)


@triton.jit
def absorb(scores, v, running, PRECISION: tl.constexpr):
    """Take some more tokens into a running softmax."""
    sums, top, total = running
    new_top = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(shares, 1)
    sums = sums * fade[:, None]
    sums = tl.dot(shares.to(v.dtype), v, sums, input_precision=PRECISION)
    return sums, new_top, total
