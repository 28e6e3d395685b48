"""What attention kernels share: a program's rows, the running softmax, splits of a context."""

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
    running,  # of the softmax, done
    rows,  # [ROWS]: which rows they are
    is_row,
    value_scale,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Store the rows' results."""
    sums, _, total = running
    result = sums * (value_scale / total)[:, None]
    dims = tl.arange(0, DIM_PADDED)
    mask = is_row[:, None] & (dims < DIM)[None, :]
    at = rows[:, None] * DIM + dims[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_weights(
    weights,  # of splits: float32, one of each row; where that of row 0 is
    running,  # of the softmax, done
    rows,  # [ROWS]: which rows they are
    is_row,
):
    """Store what a split's results count when they are merged: log2 of its sum of exponentials."""
    _, top, total = running
    tl.store(weights + rows, top + tl.log2(total), mask=is_row)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The running softmax of no tokens: weighted sums of values, largest score, sum of weights."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS, DIM], tl.float32), top, tl.zeros([ROWS], tl.float32)


@triton.jit
def update_softmax(scores, v, running, PRECISION: tl.constexpr):
    """Take some more tokens into a running softmax."""
    sums, top, total = running
    new_top = tl.maximum(top, tl.max(scores, 1))
    shares = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(shares, 1)
    sums = sums * fade[:, None]
    sums = tl.dot(shares.to(v.dtype), v, sums, input_precision=PRECISION)
    return sums, new_top, total


@triton.jit
def split_tokens(context, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, TOKENS: tl.constexpr):
    """Tokens of every split but the last: a multiple of TOKENS.

    It depends on the sequence's own context alone, so that the order of its sums, and with it its
    result to the bit, does not depend on the others of its batch.
    """
    splits = tl.maximum(tl.minimum(tl.cdiv(context, MIN_SPLIT), MAX_SPLITS), 1)
    return tl.cdiv(tl.cdiv(context, splits), TOKENS) * TOKENS


@triton.jit
def has_one_split(context, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Whether a context is not cut, so that there is nothing to merge."""
    return (context <= MIN_SPLIT) | (MAX_SPLITS == 1)


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


@triton.jit
def splits_each(
    count,  # of splits
    programs,  # that share them
    least,  # that one takes, if there are so many
):
    """Splits of a program, which lie behind each other; the last that has any may have fewer."""
    return tl.maximum(tl.cdiv(count, programs), least)


@triton.jit
def is_last_to_arrive(
    arrivals,  # int32, 0 before the first of them and behind the last
    programs,  # that share some rows, and all come here
):
    """Whether all others have come. Their stores, and this program's, are read right from here on.

    What a program's threads have stored is behind a barrier when one of them counts the program in,
    which releases it; who finds the others counted has acquired what each of them released, and
    tells its threads at a barrier. So it is in causality order (PTX ISA, memory consistency model).
    """
    tl.debug_barrier()
    arrived = programs - 1
    if programs > 1:
        arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = arrived == programs - 1
    if is_last:
        tl.store(arrivals, 0)  # for the next launch
    return is_last


@triton.jit
def merge_rows(
    out,  # of rows, DIM wide and dense; where row 0 is
    parts,  # float32, of the first split; where row 0 is. The next split is HEADS rows on
    weights,  # the same
    count,  # of splits
    is_row,  # [ROWS], of rows behind each other
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the splits of some rows, in their order, and store the results.

    By a running softmax again: with the largest weight known beforehand, Triton has threads tell
    each other the shares of every split, and waits for them in between.
    """
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    mask = is_row[:, None] & (dims < DIM)[None, :]
    at = rows[:, None] * DIM + dims[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    for split in range(0, count):
        log = tl.load(weights + split * HEADS + rows, mask=is_row, other=0.0)
        part = tl.load(parts + split * HEADS * DIM + at, mask=mask, other=0.0)
        new_top = tl.maximum(top, log)
        fade, share = tl.exp2(top - new_top), tl.exp2(log - new_top)
        sums = sums * fade[:, None] + share[:, None] * part
        total, top = total * fade + share, new_top
    tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)


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
    """One program: one head of one sequence; one split is no part, but there already."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(context_lens + sequence)
    if has_one_split(context, MIN_SPLIT, MAX_SPLITS):
        return
    _, count = split_plan(context, context, MIN_SPLIT, MAX_SPLITS, TOKENS, True)
    first = sequence * splits * HEADS + head
    merge_rows(
        out + (sequence * HEADS + head) * DIM, parts + first * DIM, weights + first, count,
        tl.full([1], True, tl.int1), HEADS, DIM, DIM_PADDED, 1,
    )  # fmt: skip
