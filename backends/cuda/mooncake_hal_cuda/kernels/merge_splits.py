"""Puts the splits of a decode's context together again."""

import triton
import triton.language as tl

from mooncake_hal_cuda.kernels.splitting import split_tokens


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    out,  # [sequences, HEADS, DIM], dense
    parts,  # float32 [sequences, splits, HEADS, DIM], dense
    weights,  # float32 [sequences, splits, HEADS], log2 of each split's sum of exponentials
    context_lens,
    splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """One program: one head of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = sequence * splits * HEADS + head
    context = tl.load(context_lens + sequence)
    count = tl.cdiv(context, split_tokens(context, MIN_SPLIT, MAX_SPLITS, TOKENS))
    number = tl.arange(0, MAX_SPLITS)
    logs = tl.load(weights + first + number * HEADS, mask=number < count, other=float("-inf"))
    top = tl.max(logs, 0)
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < DIM
    total = 0.0
    sums = tl.zeros([DIM_PADDED], tl.float32)
    for split in range(0, count):
        share = tl.exp2(tl.load(weights + first + split * HEADS) - top)
        part = tl.load(parts + (first + split * HEADS) * DIM + dims, mask=is_dim, other=0.0)
        sums += share * part
        total += share
    tl.store(
        out + (sequence * HEADS + head) * DIM + dims,
        (sums / total).to(out.dtype.element_ty),
        mask=is_dim,
    )
