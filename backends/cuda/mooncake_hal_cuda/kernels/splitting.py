"""How the context of one decoding sequence is cut into splits that run side by side."""

import triton
import triton.language as tl


@triton.jit
def split_tokens(context, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """Tokens of every split but the last: a multiple of TOKENS.

    It depends on the sequence's own context alone, so that the order of its sums, and with it its
    result to the bit, does not depend on the others of its batch.
    """
    splits = tl.maximum(tl.minimum(tl.cdiv(context, MIN_SPLIT), MAX_SPLITS), 1)
    return tl.cdiv(tl.cdiv(context, splits), TOKENS) * TOKENS


@triton.jit
def split_plan(
    context,
    seen,  # by the rows in question
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """(tokens of a split, how many splits there are); none if no row sees anything."""
    share = seen
    if IS_SPLIT:
        share = split_tokens(context, MIN_SPLIT, MAX_SPLITS, TOKENS)
    return share, tl.cdiv(seen, tl.maximum(share, 1))
