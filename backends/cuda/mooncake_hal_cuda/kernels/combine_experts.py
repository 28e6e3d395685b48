"""The weighted sum of what a token's experts say, in float32, rounded once."""

import triton
import triton.language as tl


@triton.jit
def combine_experts(
    out,  # [tokens, DIM] dense
    parts,  # [tokens * CHOSEN, DIM] float32, dense
    expert_weights,  # [tokens, CHOSEN] float32, dense
    CHOSEN: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: WIDTH elements of one token."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_dim = dims < DIM
    total = tl.zeros([WIDTH], tl.float32)
    for choice in range(0, CHOSEN):
        weight = tl.load(expert_weights + token * CHOSEN + choice)
        at = (token * CHOSEN + choice) * DIM + dims
        total += weight * tl.load(parts + at, mask=is_dim, other=0.0)
    tl.store(out + token * DIM + dims, total.to(out.dtype.element_ty), mask=is_dim)
