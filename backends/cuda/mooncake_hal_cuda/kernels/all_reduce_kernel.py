"""The one-shot all-reduce of small messages: each rank writes to its own buffer and reads all."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rank", "num_words", "max_polls"])
def one_shot_all_reduce(
    x,  # [num_words * WORD] dense, at a multiple of 16 bytes; overwritten with the sum
    buffers,  # [WORLD_SIZE] int64, where each rank's buffer begins in this process
    rank,
    num_words,
    max_polls,  # how often a program polls for the other ranks before it fails
    WORLD_SIZE: tl.constexpr,
    WORLD_PADDED: tl.constexpr,
    WORD: tl.constexpr,  # elements in 16 bytes
    CHUNK: tl.constexpr,  # elements per program
    LINE: tl.constexpr,  # bytes between the counters of two programs
    CALLS: tl.constexpr,  # offset of the call counters in a buffer, in bytes; arrivals are at 0
    HALVES: tl.constexpr,  # offset of the two halves for data, in bytes
    HALF_BYTES: tl.constexpr,
):
    """One program: one chunk. It synchronises with the same program of every rank, and no other.

    A buffer has two halves for data and two counters per program: arrivals, to which this program
    of every rank adds 1 per call, and its own rank's calls. ``one_shot_all_reduce.py`` proves that
    this is sufficient.
    """
    program = tl.program_id(0).to(tl.int64)
    own = tl.load(buffers + rank)
    counted = (own + CALLS + program * LINE).to(tl.pointer_type(tl.int64))
    number = tl.load(counted) + 1
    half = HALVES + (number % 2) * HALF_BYTES
    offsets = program * CHUNK + tl.arange(0, CHUNK)
    mask = offsets < num_words * WORD  # a multiple of WORD, which keeps accesses 16 bytes wide
    mine = tl.multiple_of((own + half).to(tl.pointer_type(x.dtype.element_ty)), 16)
    tl.store(mine + offsets, tl.load(x + offsets, mask=mask), mask=mask)
    tl.debug_barrier()  # orders the stores of all threads before the releases below
    ranks = tl.arange(0, WORLD_PADDED)
    is_rank = ranks < WORLD_SIZE
    theirs = tl.load(buffers + ranks, mask=is_rank, other=0) + program * LINE
    theirs = theirs.to(tl.pointer_type(tl.int64))
    tl.atomic_add(theirs, 1, mask=is_rank, sem="release", scope="sys")
    halves = ()  # loaded before the acquire, which invalidates L1
    for other in tl.static_range(WORLD_SIZE):
        begin = tl.load(buffers + other) + half
        # Triton knows no (*halves, begin)
        halves = halves + (begin,)  # type: ignore[assignment]  # noqa: RUF005  # it grows
    arrivals = (own + program * LINE).to(tl.pointer_type(tl.int64))
    wanted = number * WORLD_SIZE
    # one thread acquires and broadcasts the count, so that all threads leave the loop together
    arrived = tl.atomic_add(arrivals, 0, sem="acquire", scope="sys")
    polls = tl.zeros((), tl.int64)
    while (arrived < wanted) & (polls < max_polls):
        arrived = tl.atomic_add(arrivals, 0, sem="acquire", scope="sys")
        polls += 1
    tl.device_assert(arrived >= wanted, "all-reduce: a rank is lost, or did not come in time")
    tl.debug_barrier()
    total = tl.zeros([CHUNK], tl.float32)
    for other in tl.static_range(WORLD_SIZE):  # in rank order, so that all ranks get the same bits
        their_chunk = tl.multiple_of(halves[other].to(tl.pointer_type(x.dtype.element_ty)), 16)
        total += tl.load(their_chunk + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + offsets, total.to(x.dtype.element_ty), mask=mask)
    tl.store(counted, number)
