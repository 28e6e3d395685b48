"""Draws a token per row of logits within top-k, top-p and min-p, without sorting.

Every filter is a threshold on how far a logit is below its row's largest. Such a distance is no
negative float, so its bits order as integers do, and the threshold is found bit by bit: two more
bits with each look at the row.
"""

import triton
import triton.language as tl

_SMALLEST_TEMPERATURE: tl.constexpr = tl.constexpr(1e-5)


@triton.jit(do_not_specialize=["vocab_size"])
def sample_tokens(
    tokens,  # [rows] int64
    logits,  # [rows, vocab_size] float32
    temperatures,  # [rows] float32; 0 takes the largest
    top_ks,  # [rows] int32; 0 is off
    top_ps,  # [rows] float32; 1 is off
    min_ps,  # [rows] float32; 0 is off
    uniforms,  # [rows] float64 in [0, 1)
    vocab_size,
    row_stride,
    WIDTH: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    top = _largest(logits, vocab_size, WIDTH)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    inverse = tl.maximum(temperature, _SMALLEST_TEMPERATURE)
    limit = tl.full(
        [], 0x7F7FFFFF, tl.int32
    )  # the largest finite distance: what is masked is never drawn
    if temperature == 0.0:
        limit = tl.full([], 0, tl.int32)
    else:
        if min_p > 0.0:
            limit = tl.minimum(limit, (0.0 - tl.log(min_p)).to(tl.int32, bitcast=True))
        if (top_k > 0) & (top_k < vocab_size):
            wanted = top_k.to(tl.float64)
            found = _threshold(logits, top, inverse, limit, wanted, vocab_size, False, WIDTH)
            limit = tl.minimum(limit, found)
        if top_p < 1.0:
            mass = _mass(logits, top, inverse, limit, vocab_size, WIDTH)
            wanted = top_p.to(tl.float64) * mass
            found = _threshold(logits, top, inverse, limit, wanted, vocab_size, True, WIDTH)
            limit = tl.minimum(limit, found)
    target = _mass(logits, top, inverse, limit, vocab_size, WIDTH) * tl.load(uniforms + row)
    if temperature == 0.0:
        target *= 0.0
    token = _find(logits, top, inverse, limit, target, vocab_size, WIDTH)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _largest(logits, vocab_size, WIDTH: tl.constexpr):
    best = tl.full([WIDTH], float("-inf"), tl.float32)
    for begin in range(0, vocab_size, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        values = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
        best = tl.maximum(best, values)
    return tl.max(best, 0)


@triton.jit
def _distances(logits, begin, top, inverse, vocab_size, WIDTH: tl.constexpr):
    """How far the logits from ``begin`` on are below the largest, and the same as integers."""
    at = begin + tl.arange(0, WIDTH)
    values = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
    distance = (top - values) / inverse
    return distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _mass(logits, top, inverse, limit, vocab_size, WIDTH: tl.constexpr):
    """What the tokens up to ``limit`` weigh together."""
    total = tl.zeros([WIDTH], tl.float64)
    for begin in range(0, vocab_size, WIDTH):
        distance, key = _distances(logits, begin, top, inverse, vocab_size, WIDTH)
        total += tl.where(key <= limit, tl.exp(-distance), 0.0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _threshold(
    logits, top, inverse, limit, wanted, vocab_size, WEIGHED: tl.constexpr, WIDTH: tl.constexpr
):
    """The smallest distance within which tokens up to ``limit`` number, or weigh, ``wanted``."""
    found = tl.full([], 0, tl.int64)
    for step in range(0, 16):
        shift = 30 - 2 * step
        low = tl.zeros([WIDTH], tl.float64)
        middle = tl.zeros([WIDTH], tl.float64)
        high = tl.zeros([WIDTH], tl.float64)
        for begin in range(0, vocab_size, WIDTH):
            distance, key = _distances(logits, begin, top, inverse, vocab_size, WIDTH)
            weight = tl.full([WIDTH], 1.0, tl.float64)
            if WEIGHED:
                weight = tl.exp(-distance).to(tl.float64)
            weight = tl.where(key <= limit, weight, 0.0)
            # unsigned: the highest pair of bits has the sign's
            place = (key.to(tl.uint32, bitcast=True) >> shift).to(tl.int64) - (found >> shift)
            low += tl.where(place < 1, weight, 0.0)
            middle += tl.where(place < 2, weight, 0.0)
            high += tl.where(place < 3, weight, 0.0)
        taken = (tl.sum(low, 0) < wanted).to(tl.int64)
        taken += (tl.sum(middle, 0) < wanted).to(tl.int64)
        taken += (tl.sum(high, 0) < wanted).to(tl.int64)
        found = found + (taken << shift)
    return tl.minimum(found, 0x7F7FFFFF).to(tl.int32)


@triton.jit
def _find(logits, top, inverse, limit, target, vocab_size, WIDTH: tl.constexpr):
    """The first token at which the running weight exceeds ``target``; at worst the last kept."""
    before = tl.zeros([1], tl.float64)
    chosen = vocab_size
    last = 0
    for begin in range(0, vocab_size, WIDTH):
        distance, key = _distances(logits, begin, top, inverse, vocab_size, WIDTH)
        at = begin + tl.arange(0, WIDTH)
        is_kept = key <= limit
        weight = tl.where(is_kept, tl.exp(-distance), 0.0).to(tl.float64)
        running = before + tl.cumsum(weight, 0)
        reached = tl.min(tl.where(is_kept & (running > target), at, vocab_size), 0)
        chosen = tl.minimum(chosen, reached)
        last = tl.maximum(last, tl.max(tl.where(is_kept, at, 0), 0))
        before += tl.sum(weight, 0)
    return tl.where(chosen < vocab_size, chosen, last)
