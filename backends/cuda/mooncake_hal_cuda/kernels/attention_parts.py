"""Parts shared by the attention kernels: the rows of a program, online softmax, context splits."""

import triton
import triton.language as tl

_UNROLLED_SPLITS: tl.constexpr = tl.constexpr(4)
"""Splits that a merge loads at once: one after the other, each would take a round trip to L2."""


@triton.jit
def rows_of(
    query_start,
    context_lens,
    first,  # the launch's first sequence
    sequence,
    row_block,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Locate the rows of a row block: row r of a sequence is head ``r % GROUP`` of its new token
    ``r // GROUP``.

    Returns:
        For each row, [ROWS]: whether it exists, its token's index among the launch's tokens, its
        head within the group, and its position in the context. Then three lengths: of the context,
        of its beginning that all rows see, and of its beginning that any row sees, which is 0 if
        the block has no rows.
    """
    begin = tl.load(query_start + sequence)
    new_tokens = tl.load(query_start + sequence + 1) - begin
    before = begin - tl.load(query_start + first)
    context = tl.load(context_lens + sequence)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    tokens = before + rows // GROUP
    is_row = rows < new_tokens * GROUP
    old = context - new_tokens
    common = old + (row_block * ROWS) // GROUP + 1  # the tokens that the first row sees
    seen = tl.minimum(context, old + ((row_block + 1) * ROWS - 1) // GROUP + 1)
    seen = tl.where(row_block * ROWS < new_tokens * GROUP, seen, 0)
    return is_row, tokens, rows % GROUP, old + rows // GROUP, context, common, seen


@triton.jit
def row_offsets(tokens, heads, strides):
    """Offsets of rows in a tensor [tokens, heads, dim]: [ROWS, 1] int64."""
    return tokens.to(tl.int64)[:, None] * strides[0] + heads[:, None] * strides[1]


@triton.jit
def load_rows(source, is_row, tokens, heads, strides, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Load rows of a tensor [tokens, heads, DIM], zeros for rows that don't exist:
    [ROWS, DIM_PADDED]."""
    dims = tl.arange(0, DIM_PADDED)[None, :]
    mask = is_row[:, None] & (dims < DIM)
    return tl.load(source + row_offsets(tokens, heads, strides) + dims, mask=mask, other=0.0)


@triton.jit
def store_rows(
    out,  # rows of DIM elements, dense; the address of row 0
    running,  # final state of the online softmax
    rows,  # [ROWS] row numbers, relative to ``out``
    is_row,
    value_scale,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Store the results of rows."""
    sums, _, total = running
    result = sums * (value_scale / total)[:, None]
    dims = tl.arange(0, DIM_PADDED)
    mask = is_row[:, None] & (dims < DIM)[None, :]
    at = rows[:, None] * DIM + dims[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_weights(
    weights,  # float32, one per row of a split; the address of row 0's
    running,  # final state of the online softmax
    rows,  # [ROWS] row numbers, relative to ``weights``
    is_row,
):
    """Store the merge weights of a split's rows: log2 of each row's sum of exponentials."""
    _, top, total = running
    tl.store(weights + rows, top + tl.log2(total), mask=is_row)


@triton.jit
def empty_softmax(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The initial state of the online softmax: weighted sums of values, largest score, sum of
    weights."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return tl.zeros([ROWS, DIM], tl.float32), top, tl.zeros([ROWS], tl.float32)


@triton.jit
def update_softmax(scores, v, running, PRECISION: tl.constexpr):
    """Add tokens to the state of the online softmax."""
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
    """The length of every split but the last, in tokens: a multiple of TOKENS.

    It depends only on the sequence's own context. The order of the sequence's sums, and therefore
    every bit of its result, does not depend on the rest of its batch.
    """
    splits = tl.maximum(tl.minimum(tl.cdiv(context, MIN_SPLIT), MAX_SPLITS), 1)
    return tl.cdiv(tl.cdiv(context, splits), TOKENS) * TOKENS


@triton.jit
def has_one_split(context, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Whether a context has a single split, so that nothing has to be merged."""
    return (context <= MIN_SPLIT) | (MAX_SPLITS == 1)


@triton.jit
def split_plan(
    context,
    seen,  # number of tokens that the program's rows see
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """(tokens per split, number of splits); no splits if no row sees a token."""
    share = seen
    if IS_SPLIT:
        share = split_tokens(context, MIN_SPLIT, MAX_SPLITS, TOKENS)
    return share, tl.cdiv(seen, tl.maximum(share, 1))


@triton.jit
def splits_each(
    count,  # number of splits
    programs,  # number of programs that share them
    least,  # least number of splits per program
):
    """The number of consecutive splits per program; the last program with splits may have fewer."""
    return tl.maximum(tl.cdiv(count, programs), least)


@triton.jit
def is_last_to_arrive(
    arrivals,  # int32 counter, 0 before the first arrival and after the last
    programs,  # number of programs that share the rows, at least two; each calls this once
):
    """Whether this program is the last one to arrive; if so, the stores of all of them are visible
    to it.

    A barrier precedes the atomic addition, so that the addition releases the stores of all threads
    of the program. The addition that finds all others counted acquires what each of them released,
    and a second barrier orders it before the reads of the program's other threads. The stores
    therefore precede the reads in causality order (PTX ISA, memory consistency model).
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    is_last = arrived == programs - 1
    if is_last:
        tl.store(arrivals, 0)  # for the next launch
    return is_last


@triton.jit
def split_result(running, value_scale, KEPT_ROWS: tl.constexpr):
    """What a split adds to the merge: the results of the leading rows, [KEPT_ROWS, DIM], and their
    weights, [KEPT_ROWS], which are log2 of each row's sum of exponentials.

    Matrix products have at least 16 rows, of which a decode needs as many as a group has heads.
    Dropping the others first takes a quarter of the registers, and of the shared memory with which
    results are exchanged between threads.
    """
    sums, top, total = running
    part, weight = sums * (value_scale / total)[:, None], top + tl.log2(total)
    ROWS: tl.constexpr = sums.shape[0]
    if KEPT_ROWS == ROWS:
        return part, weight
    is_kept = tl.arange(0, ROWS // KEPT_ROWS) == 0
    part = tl.reshape(part, (ROWS // KEPT_ROWS, KEPT_ROWS, sums.shape[1]))
    weight = tl.reshape(weight, (ROWS // KEPT_ROWS, KEPT_ROWS))
    part = tl.sum(tl.where(is_kept[:, None, None], part, 0.0), 0)
    return part, tl.sum(tl.where(is_kept[:, None], weight, 0.0), 0)


@triton.jit
def add_split(merged, part, weight):
    """Add a split's results to the state of a merge, which is an online softmax over splits.

    The products are fused explicitly, so that every kernel that merges gets the same bits.
    """
    sums, top, total = merged
    new_top = tl.maximum(top, weight)
    fade, share = tl.exp2(top - new_top), tl.exp2(weight - new_top)
    sums = tl.fma(sums, tl.broadcast_to(fade[:, None], sums.shape), share[:, None] * part)
    return sums, new_top, tl.fma(total, fade, share)


@triton.jit
def store_merged(
    out,  # rows of DIM elements, dense; the address of row 0
    merged,
    is_row,  # [ROWS], for consecutive rows
    DIM: tl.constexpr,
):
    """Store the results of a merge."""
    sums, _, total = merged
    rows, dims = tl.arange(0, sums.shape[0]), tl.arange(0, sums.shape[1])
    mask = is_row[:, None] & (dims < DIM)[None, :]
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * DIM + dims[None, :], result, mask=mask)


@triton.jit
def merge_rows(
    out,  # rows of DIM elements, dense; the address of row 0
    parts,  # float32; the address of row 0 of the first split. The next split is HEADS rows later
    weights,  # float32, in the same order
    count,  # number of splits
    is_row,  # [ROWS], for consecutive rows
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    """Merge the stored splits of some rows, in order, and store the results.

    This is an online softmax as well. If the largest weight were computed first, Triton would
    exchange the shares of every split between threads, with a wait for each.
    """
    rows, dims = tl.arange(0, is_row.shape[0]), tl.arange(0, DIM_PADDED)
    mask = is_row[:, None] & (dims < DIM)[None, :]
    at = rows[:, None] * DIM + dims[None, :]
    merged = empty_softmax(is_row.shape[0], DIM_PADDED)
    for split in tl.range(0, count, loop_unroll_factor=_UNROLLED_SPLITS):
        weight = tl.load(weights + split * HEADS + rows, mask=is_row, other=0.0)
        part = tl.load(parts + split * HEADS * DIM + at, mask=mask, other=0.0)
        merged = add_split(merged, part, weight)
    store_merged(out, merged, is_row, DIM)


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
    """Merge the splits of decodes. One program: one head of one sequence.

    A context with a single split needs no merge: its result is already in ``out``.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(context_lens + sequence)
    if has_one_split(context, MIN_SPLIT, MAX_SPLITS):
        return
    _, count = split_plan(context, context, MIN_SPLIT, MAX_SPLITS, TOKENS, True)
    first = sequence * splits * HEADS + head
    merge_rows(
        out + (sequence * HEADS + head) * DIM, parts + first * DIM, weights + first, count,
        tl.full([1], True, tl.int1), HEADS, DIM, DIM_PADDED,
    )  # fmt: skip
