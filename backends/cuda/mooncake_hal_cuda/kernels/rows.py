"""Which query rows a program of an attention kernel has, and where their results go."""

import triton
import triton.language as tl


@triton.jit
def rows_of(
    query_start,
    context_lens,
    first,  # of the sequences that the launch is about
    sequence,
    row_block,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Row r of a sequence is head ``r % GROUP`` of its new token ``r // GROUP``.

    Returns of each row [ROWS] whether there is one, its token among the launch's, its head in the
    group and its position in the context; then the context's length, how much of it all rows see,
    and how much any of them: 0 if the block has no row.
    """
    begin = tl.load(query_start + sequence)
    new_tokens = tl.load(query_start + sequence + 1) - begin
    before = begin - tl.load(query_start + first)
    context = tl.load(context_lens + sequence)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    tokens = before + rows // GROUP
    is_row = rows < new_tokens * GROUP
    old = context - new_tokens
    common = old + (row_block * ROWS) // GROUP + 1  # what the first row sees
    seen = tl.minimum(context, old + ((row_block + 1) * ROWS - 1) // GROUP + 1)
    seen = tl.where(row_block * ROWS < new_tokens * GROUP, seen, 0)
    return is_row, tokens, rows % GROUP, old + rows // GROUP, context, common, seen


@triton.jit
def row_offsets(tokens, heads, strides):
    """Where rows begin in a tensor [tokens, heads, dim]: [ROWS, 1] int64."""
    return tokens.to(tl.int64)[:, None] * strides[0] + heads[:, None] * strides[1]


@triton.jit
def load_rows(source, is_row, tokens, heads, strides, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Rows of a tensor [tokens, heads, DIM], zeros where there is none: [ROWS, DIM_PADDED]."""
    dims = tl.arange(0, DIM_PADDED)[None, :]
    mask = is_row[:, None] & (dims < DIM)
    return tl.load(source + row_offsets(tokens, heads, strides) + dims, mask=mask, other=0.0)


@triton.jit
def store_rows(
    out,  # of rows, DIM wide and dense; where row 0 of ``rows`` is
    weights,  # of splits: float32, one of each row; where that of row 0 is
    running,  # of the softmax, done
    rows,  # [ROWS]: which rows they are
    is_row,
    value_scale,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Store the rows' results; of a split with the log2 of its sum of exponentials."""
    sums, top, total = running
    result = sums * (value_scale / total)[:, None]
    dims = tl.arange(0, DIM_PADDED)
    mask = is_row[:, None] & (dims < DIM)[None, :]
    if IS_SPLIT:
        tl.store(weights + rows, top + tl.log2(total), mask=is_row)
    at = rows[:, None] * DIM + dims[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)
