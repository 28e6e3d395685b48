"""The gate of a feed-forward layer: ``silu(gate) * up``."""

import triton
import triton.language as tl


@triton.jit
def silu_mul(
    out,  # [rows, HALF] dense
    x,  # [rows, 2 * HALF], gate then up
    row_stride,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: WIDTH elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_dim = dims < HALF
    x += row * row_stride
    gate = tl.load(x + dims, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(x + HALF + dims, mask=is_dim, other=0.0).to(tl.float32)
    # sigmoid by the branch whose exponential can't overflow
    small = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, small) / (1.0 + small)
    tl.store(out + row * HALF + dims, (gate * sigmoid * up).to(out.dtype.element_ty), mask=is_dim)
