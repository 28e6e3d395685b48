"""Root mean square norm of rows, with or without a residual to add first."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["inner"])
def rms_norm(
    out,  # dense
    x,
    residual,  # [rows, DIM] dense; overwritten with the sum
    weight,
    eps,
    inner,  # rows per step of ``outer_stride``
    outer_stride,
    inner_stride,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program: one row. ``out`` may be ``x``."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, DIM_PADDED)
    is_dim = dims < DIM
    x += row // inner * outer_stride + row % inner * inner_stride
    values = tl.load(x + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual += row * DIM
        values += tl.load(residual + dims, mask=is_dim, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + dims, rounded, mask=is_dim)
        values = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / DIM + eps)
    scaled = values * inverse * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + dims, scaled.to(out.dtype.element_ty), mask=is_dim)
