"""Softmax that is carried along as more tokens come, in base 2."""

import triton
import triton.language as tl


@triton.jit
def absorb(scores, v, sums, top, total, PRECISION: tl.constexpr):
    """Take some more tokens into a running softmax."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(shares, 1)
    sums = sums * fade[:, None]
    sums = tl.dot(shares.to(v.dtype), v, sums, input_precision=PRECISION)
    return sums, new_top, total
