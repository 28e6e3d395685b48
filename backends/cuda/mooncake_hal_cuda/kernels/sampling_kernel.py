"""Samples a token per row of logits under top-k, top-p and min-p, without sorting; and finds the
largest logit of each row.

Every filter is a threshold on a logit's distance below the largest logit of its row. A distance is
a non-negative float, so its bits compare as integers do. ``summarise_slices`` reads each row once
and stores the largest logit of every group of 64. A group can only contain a candidate if its
largest logit is within the threshold: ``sample_tokens`` lists such groups, in token order, and
searches for the exact thresholds among their logits. If a filter excludes no group, as with flat
distributions, all groups are listed: the result is the same, but takes longer.
"""

import triton
import triton.language as tl

GROUP = 64
"""Logits per group: 256 bytes, which are read together or not at all."""

_GROUP: tl.constexpr = tl.constexpr(GROUP)
_QUADS: tl.constexpr = tl.constexpr(GROUP // 4)
_SMALLEST_TEMPERATURE: tl.constexpr = tl.constexpr(1e-5)
_FARTHEST: tl.constexpr = tl.constexpr(0x7F7FFFFF)
"""The bits of the largest finite distance: masked tokens, which are farther, are never sampled."""
_EVEN_ROUNDS: tl.constexpr = tl.constexpr(5)
"""Rounds in which a threshold search divides the interval of distances evenly; later rounds divide
the interval of their bits."""
_NO_TOKEN: tl.constexpr = tl.constexpr(2**31 - 1)
"""More than any token id."""


@triton.jit
def argmax_slices(
    maxima,  # [rows, slices] float32, largest logit of each slice; infinite if one is NaN
    indexes,  # [rows, slices] int32, the first token with that logit
    logits,  # [rows, vocab_size]
    vocab_size,
    row_stride,
    STEPS: tl.constexpr,  # tiles per slice
    WIDTH: tl.constexpr,  # logits per tile
):
    """One program: a slice of one row. A single program per row would leave most of the device
    idle: torch's takes 40 us for a row of 128k logits on an H200, these two kernels 6."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    best, at = tl.full([WIDTH], float("-inf"), tl.float32), tl.zeros([WIDTH], tl.int32)
    for step in range(STEPS):
        tokens = (part * STEPS + step) * WIDTH + tl.arange(0, WIDTH)
        values = tl.load(
            logits + row * row_stride + tokens, mask=tokens < vocab_size, other=float("-inf")
        ).to(tl.float32)
        values = tl.where(values != values, float("inf"), values)
        at = tl.where(values > best, tokens, at)
        best = tl.maximum(values, best)
    largest = tl.max(best, 0)
    tl.store(maxima + row * tl.num_programs(0) + part, largest)
    first = tl.min(tl.where(best == largest, at, _NO_TOKEN), 0)
    tl.store(indexes + row * tl.num_programs(0) + part, first)


@triton.jit
def argmax_rows(
    tokens,  # [rows] int64; -1 where the largest logit is not finite
    maxima,  # output of argmax_slices
    indexes,  # output of argmax_slices
    SLICES: tl.constexpr,
    SLICES_PADDED: tl.constexpr,
):
    """One program: one row."""
    row, parts = tl.program_id(0), tl.arange(0, SLICES_PADDED)
    is_part = parts < SLICES
    best = tl.load(maxima + row * SLICES + parts, mask=is_part, other=float("-inf"))
    at = tl.load(indexes + row * SLICES + parts, mask=is_part, other=_NO_TOKEN)
    largest = tl.max(best, 0)
    first = tl.min(tl.where(best == largest, at, _NO_TOKEN), 0)
    is_finite = tl.abs(largest) < float("inf")
    tl.store(tokens + row, tl.where(is_finite, first, -1).to(tl.int64))


@triton.jit
def summarise_slices(
    maxima,  # [rows, slices * GROUPS] float32, largest logit of each group
    slice_maxima,  # [rows, slices] float32
    slice_masses,  # [rows, slices] float64, sums of weights relative to the slice's largest logit
    logits,  # [rows, vocab_size] float32
    temperatures,  # [rows] float32
    vocab_size,
    row_stride,
    GROUPS: tl.constexpr,
):
    """One program: a slice of one row, which has GROUPS groups."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slices = tl.num_programs(0)
    groups = tl.arange(0, GROUPS)
    at = (part * GROUPS + groups)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    values = tl.load(logits + row * row_stride + at, mask=at < vocab_size, other=float("-inf"))
    of_groups = tl.max(values, 1)
    largest = tl.max(of_groups, 0)
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    inverse = 1.0 / tl.maximum(tl.load(temperatures + row), _SMALLEST_TEMPERATURE)
    masses = tl.sum(tl.exp(-((reference - values) * inverse)), 1)
    tl.store(maxima + (row * slices + part) * GROUPS + groups, of_groups)
    tl.store(slice_maxima + row * slices + part, largest)
    tl.store(slice_masses + row * slices + part, tl.sum(masses.to(tl.float64), 0))


@triton.jit
def sample_tokens(
    tokens,  # [rows] int64
    logits,  # [rows, vocab_size] float32
    maxima,  # output of summarise_slices
    slice_maxima,  # output of summarise_slices
    slice_masses,  # output of summarise_slices
    lists,  # [rows, 2, SLICES * GROUPS] int32, buffers for lists of group ids
    temperatures,  # [rows] float32; 0: the largest logit (greedy)
    top_ks,  # [rows] int32; 0: off
    top_ps,  # [rows] float32; 1: off
    min_ps,  # [rows] float32; 0: off
    uniforms,  # [rows] float64 in [0, 1)
    vocab_size,
    row_stride,
    SLICES: tl.constexpr,
    SLICES_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    all_groups: tl.constexpr = SLICES * GROUPS
    logits += row * row_stride
    maxima += row * all_groups
    lists += row * 2 * all_groups
    temperature = tl.load(temperatures + row)
    inverse = 1.0 / tl.maximum(temperature, _SMALLEST_TEMPERATURE)
    top, masses = _merge_slices(slice_maxima, slice_masses, row, inverse, SLICES, SLICES_PADDED)
    slices = tl.arange(0, SLICES_PADDED)
    mass = tl.sum(masses, 0)

    limit = tl.full([], _FARTHEST, tl.int32)
    min_p = tl.load(min_ps + row)
    if min_p > 0.0:
        limit = tl.minimum(limit, (0.0 - tl.log(min_p)).to(tl.int32, bitcast=True))
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    top_k = tl.where((top_k < vocab_size) & (temperature != 0.0), top_k, 0)
    top_p = tl.where(temperature != 0.0, top_p, 1.0)
    limit = tl.where(temperature == 0.0, 0, limit)
    listed = tl.full([], -1, tl.int32)
    count = (vocab_size + _GROUP - 1) // _GROUP
    begin = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    if (top_k > 0) | (top_p < 1.0) | (limit < _FARTHEST):
        listed = tl.full([], 0, tl.int32)
        limit, mass, count = _filter(
            logits, vocab_size, maxima, lists, top, inverse, limit, mass, top_k, top_p,
            SLICES * GROUPS, GROUPS,
        )  # fmt: skip
        target = tl.where(temperature == 0.0, 0.0, tl.load(uniforms + row) * mass)
    else:  # the slices' sums tell which slice has the token
        target = tl.load(uniforms + row) * mass
        last = tl.max(tl.where(masses > 0.0, slices, 0), 0)
        chosen = tl.min(tl.where(tl.cumsum(masses, 0) > target, slices, last), 0)
        begin = chosen * GROUPS
        before = tl.sum(tl.where(slices < chosen, masses, 0.0), 0)
    token = _find(
        logits, vocab_size, lists, listed, begin, count, top, inverse, limit, before, target, GROUPS
    )
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _merge_slices(
    slice_maxima, slice_masses, row, inverse, SLICES: tl.constexpr, SLICES_PADDED: tl.constexpr
):
    """A row's largest logit, and the sum of weights of each slice relative to it."""
    slices = tl.arange(0, SLICES_PADDED)
    at = row * SLICES + slices
    largest = tl.load(slice_maxima + at, mask=slices < SLICES, other=float("-inf"))
    top = tl.max(largest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # all tokens are masked: all infinitely far
    masses = tl.load(slice_masses + at, mask=slices < SLICES, other=0.0)
    return top, masses * tl.exp(-((top - largest) * inverse))


@triton.jit
def _filter(
    logits,
    vocab_size,
    maxima,
    lists,
    top,
    inverse,
    limit,
    mass,
    top_k,
    top_p,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """List the groups that may contain a candidate.

    Returns:
        The largest distance of a candidate, the sum of the candidates' weights, and the number of
        listed groups.
    """
    is_cut = limit < _FARTHEST
    top_p = top_p.to(tl.float64)
    listed = tl.full([], 0, tl.int32)
    near = _nearest_groups(
        maxima, lists, top, inverse, limit, top_k, top_p * mass, top_k > 0,
        (top_p < 1.0) & (limit == _FARTHEST), SIZE, GROUPS,
    )  # fmt: skip
    count = _list_groups(maxima, lists, top, inverse, near, SIZE, GROUPS)
    if top_k > 0:
        limit, _ = _threshold(
            logits, vocab_size, lists, listed, count, top, inverse, tl.minimum(limit, near),
            top_k.to(tl.float64), SIZE, False, GROUPS,
        )  # fmt: skip
    if (top_k > 0) | is_cut:
        mass, _, _ = _sweep(
            logits,
            vocab_size,
            lists,
            listed,
            count,
            top,
            inverse,
            -1,
            limit,
            limit,
            limit,
            True,
            GROUPS,
        )
    if top_p < 1.0:
        wanted = top_p * mass
        high = _farthest_needed(tl.minimum(limit, near), mass - wanted, vocab_size)
        limit, mass = _threshold(
            logits, vocab_size, lists, listed, count, top, inverse, high, wanted, SIZE, True, GROUPS
        )
    return limit, mass, count


@triton.jit
def _nearest_groups(
    maxima,
    lists,
    top,
    inverse,
    limit,
    top_k,
    wanted,
    has_top_k,
    has_top_p,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """An upper bound of the distance of the largest logit of any group that contains a candidate.

    If the largest logits of k groups lie within a distance, at least k tokens do. If the largest
    logits of the groups within a distance have the wanted total weight, so do the tokens within it.
    """
    rows: tl.constexpr = (SIZE + _GROUP - 1) // _GROUP
    near = limit
    if has_top_k | has_top_p:
        far, mass = _extent(maxima, SIZE, rows, top, inverse, limit, GROUPS)
        if has_top_k:
            found, reached = _threshold(
                maxima, SIZE, lists, -1, rows, top, inverse, far, top_k.to(tl.float64), SIZE,
                False, GROUPS,
            )  # fmt: skip
            near = tl.where(reached >= top_k, found, limit)
        elif mass >= wanted:
            high = _farthest_needed(far, mass - wanted, SIZE)
            near, _ = _threshold(
                maxima, SIZE, lists, -1, rows, top, inverse, high, wanted, SIZE, True, GROUPS
            )
    return near


@triton.jit
def _farthest_needed(limit, rest, size):
    """A distance beyond which the total weight is less than ``rest``, with a margin for rounding.

    Beyond a distance d, each of ``size`` tokens has a weight of at most exp(-d).
    """
    rest = rest.to(tl.float32)
    needed = tl.log(tl.maximum(size / rest, 1.0)) * 1.001 + 0.001
    bits = tl.where(rest > 0.0, needed.to(tl.int32, bitcast=True), _FARTHEST)
    return tl.minimum(limit, bits)


@triton.jit
def _quads(values, size, lists, listed, begin, count, top, inverse, GROUPS: tl.constexpr):
    """Load up to GROUPS groups, four logits per row.

    The groups are the entries from ``begin`` to ``count`` of the list at ``listed``, or of all
    groups if that is negative.

    Returns:
        Distances from ``top``, their bits, and their indices in ``values``.
    """
    quads = tl.arange(0, GROUPS * _QUADS)
    place = begin + quads // _QUADS
    is_there = place < count
    group = place
    if listed >= 0:
        group = tl.load(lists + listed + place, mask=is_there, other=0)
    first = group * _GROUP + quads % _QUADS * 4
    at = first[:, None] + tl.arange(0, 4)[None, :]
    found = tl.load(values + at, mask=is_there[:, None] & (at < size), other=float("-inf"))
    distances = (top - found) * inverse
    return distances, distances.to(tl.int32, bitcast=True), at


@triton.jit
def _extent(values, size, count, top, inverse, limit, GROUPS: tl.constexpr):
    """The largest distance within ``limit``, and the total weight of all distances within it."""
    far = tl.full([GROUPS * _QUADS], 0, tl.int32)
    mass = tl.zeros([GROUPS * _QUADS], tl.float64)
    for begin in range(0, count, GROUPS):
        distances, keys, _ = _quads(values, size, values, -1, begin, count, top, inverse, GROUPS)
        far = tl.maximum(far, tl.max(tl.where(keys <= limit, keys, 0), 1))
        mass += tl.sum(tl.where(keys <= limit, tl.exp(-distances), 0.0), 1).to(tl.float64)
    return tl.max(far, 0), tl.sum(mass, 0)


@triton.jit
def _sweep(
    values,
    size,
    lists,
    listed,
    count,
    top,
    inverse,
    low,
    first,
    second,
    third,
    WEIGHED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The number of tokens, or if WEIGHED their total weight, beyond ``low`` and within each of
    three distances.

    Four tokens at a time are summed in float32, and these sums in float64.
    """
    one = tl.zeros([GROUPS * _QUADS], tl.float64)
    two = tl.zeros([GROUPS * _QUADS], tl.float64)
    three = tl.zeros([GROUPS * _QUADS], tl.float64)
    for begin in range(0, count, GROUPS):
        distances, keys, _ = _quads(values, size, lists, listed, begin, count, top, inverse, GROUPS)
        ones = tl.full([GROUPS * _QUADS, 4], 1.0, tl.float32)
        weights = tl.exp(-distances) if WEIGHED else ones
        weights = tl.where(keys > low, weights, 0.0)
        one += tl.sum(tl.where(keys <= first, weights, 0.0), 1).to(tl.float64)
        two += tl.sum(tl.where(keys <= second, weights, 0.0), 1).to(tl.float64)
        three += tl.sum(tl.where(keys <= third, weights, 0.0), 1).to(tl.float64)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def _threshold(
    values,
    size,
    lists,
    listed,
    count,
    top,
    inverse,
    high,
    wanted,
    spare,
    WEIGHED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Find the smallest distance within which the number of tokens, or if WEIGHED their total
    weight, is at least ``wanted``.

    A list with more than GROUPS groups is reduced, in ``lists`` at ``spare``, once few groups can
    contain the threshold.

    Returns:
        The distance, or ``high`` if there is none up to ``high``; and the number or weight of the
        tokens within it.
    """
    low = tl.full([], -1, tl.int32)
    below = tl.full([], 0.0, tl.float64)
    mass = tl.full([], -1.0, tl.float64)
    rounds = 0
    while (rounds < _EVEN_ROUNDS) & (high - low > 1):
        near = tl.maximum(low, 0).to(tl.float32, bitcast=True)
        step = (high.to(tl.float32, bitcast=True) - near) * 0.25
        low, high, below, mass = _round(
            values, size, lists, listed, count, top, inverse, low, high, below, mass, wanted,
            (near + step).to(tl.int32, bitcast=True),
            (near + 2.0 * step).to(tl.int32, bitcast=True),
            (near + 3.0 * step).to(tl.int32, bitcast=True),
            WEIGHED, GROUPS,
        )  # fmt: skip
        rounds += 1
    if count > GROUPS:
        count = _list_groups_between(
            values, size, lists, listed, spare, count, top, inverse, low, high, GROUPS
        )
        listed = tl.full([], 0, tl.int32) + spare
    while high - low > 1:
        step = (high - low) // 4
        low, high, below, mass = _round(
            values, size, lists, listed, count, top, inverse, low, high, below, mass, wanted,
            low + step, low + 2 * step, low + 3 * step,
            WEIGHED, GROUPS,
        )  # fmt: skip
    if mass < 0.0:  # no round has computed the sum within ``high``
        mass, _, _ = _sweep(
            values, size, lists, listed, count, top, inverse, low, high, high, high, WEIGHED, GROUPS
        )
        mass += below
    return high, mass


@triton.jit
def _round(
    values,
    size,
    lists,
    listed,
    count,
    top,
    inverse,
    low,
    high,
    below,
    mass,
    wanted,
    first,
    second,
    third,
    WEIGHED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Narrow the interval of a search by three distances within it, at least by one."""
    first = tl.minimum(tl.maximum(first, low + 1), high - 1)
    second = tl.minimum(tl.maximum(second, first), high - 1)
    third = tl.minimum(tl.maximum(third, second), high - 1)
    one, two, three = _sweep(
        values, size, lists, listed, count, top, inverse, low, first, second, third, WEIGHED, GROUPS
    )
    one += below
    two += below
    three += below
    if one >= wanted:
        high, mass = first, one
    elif two >= wanted:
        low, below, high, mass = first, one, second, two
    elif three >= wanted:
        low, below, high, mass = second, two, third, three
    else:
        low, below = third, three
    return low, high, below, mass


@triton.jit
def _list_groups(maxima, lists, top, inverse, near, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """List the groups whose largest logit is within ``near``; returns their number."""
    width: tl.constexpr = GROUPS * _QUADS
    count = tl.full([], 0, tl.int32)
    for begin in range(0, SIZE, width):
        groups = begin + tl.arange(0, width)
        largest = tl.load(maxima + groups, mask=groups < SIZE, other=float("-inf"))
        is_near = ((top - largest) * inverse).to(tl.int32, bitcast=True) <= near
        count = _append(lists, groups, is_near, count)
    tl.debug_barrier()
    return count


@triton.jit
def _list_groups_between(
    values, size, lists, listed, spare, count, top, inverse, low, high, GROUPS: tl.constexpr
):
    """List, at ``spare``, those groups of a list that have a token with a distance in (low, high];
    returns their number."""
    found = tl.full([], 0, tl.int32)
    for begin in range(0, count, GROUPS):
        place = begin + tl.arange(0, GROUPS)
        is_there = place < count
        groups = place
        if listed >= 0:
            groups = tl.load(lists + listed + place, mask=is_there, other=0)
        at = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        tokens = tl.load(values + at, mask=is_there[:, None] & (at < size), other=float("-inf"))
        keys = ((top - tokens) * inverse).to(tl.int32, bitcast=True)
        is_between = tl.max(((keys > low) & (keys <= high)).to(tl.int32), 1) > 0
        found = _append(lists + spare, groups, is_between & is_there, found)
    tl.debug_barrier()
    return found


@triton.jit
def _append(lists, groups, is_wanted, count):
    """Append the wanted groups to a list of ``count`` entries; returns the new length."""
    until = tl.cumsum(is_wanted.to(tl.int32), 0)
    tl.store(lists + count + until - 1, groups, mask=is_wanted)
    return count + tl.sum(is_wanted.to(tl.int32), 0)


@triton.jit
def _find(
    logits,
    vocab_size,
    lists,
    listed,
    begin,
    count,
    top,
    inverse,
    limit,
    before,
    target,
    GROUPS: tl.constexpr,
):
    """The first token at which the cumulative weight exceeds ``target``, or the last kept token if
    rounding prevents that.

    Args:
        begin: the first entry of the list that may contain the token.
        before: total weight of the tokens in earlier groups.
    """
    last = tl.full([], -1, tl.int32)
    chosen = tl.full([], -1, tl.int32)
    while (begin < count) & (chosen < 0):
        distances, keys, at = _quads(
            logits, vocab_size, lists, listed, begin, count, top, inverse, GROUPS
        )
        is_kept = keys <= limit
        weights = tl.where(is_kept, tl.exp(-distances), 0.0)
        quads = tl.sum(weights, 1).to(tl.float64)
        after = before + tl.sum(quads, 0)
        last = tl.maximum(last, tl.max(tl.max(tl.where(is_kept, at, -1), 1), 0))
        if after > target:
            rest = (target - before - (tl.cumsum(quads, 0) - quads)).to(tl.float32)
            exceeds = tl.cumsum(weights, 1) > rest[:, None]
            reached = tl.where(is_kept & exceeds, at, vocab_size)
            first = tl.min(tl.min(reached, 1), 0)
            chosen = tl.where(first < vocab_size, first, last)
        before = after
        begin += GROUPS
    return tl.maximum(tl.where(chosen >= 0, chosen, last), 0)
