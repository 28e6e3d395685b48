"""Compiled copies of any size and alignment, with and without streaming stores."""

import ctypes
import platform
import time
from pathlib import Path

import numpy as np
import pytest

from mooncake_hal import native
from mooncake_hal.transport import Spans
from mooncake_hal.transports.shm import shm_copying
from mooncake_hal.transports.shm.shm_copying import CopyMethod, CopyOutcome, Streaming, make_job

SOURCE = Path(shm_copying.__file__).with_name("copy.c").read_text()
GUARD = 64
MAX_PIECE = 5 * 4 * 4096


def flags_of_this_cpu() -> list[str]:
    """Compiler flags of the instruction sets that the source supports and this CPU has."""
    if platform.machine() != "x86_64":
        return ["-march=native"]
    has_avx2 = " avx2 " in Path("/proc/cpuinfo").read_text()
    return ["-march=native", "-march=x86-64", *(["-march=x86-64-v3"] if has_avx2 else [])]


@pytest.mark.parametrize("flag", flags_of_this_cpu())
@pytest.mark.parametrize("streaming", Streaming)
@pytest.mark.parametrize("write", [False, True])
def test_copies_move_exactly_the_wanted_bytes(flag: str, streaming: Streaming, write: bool) -> None:
    library = native.compile_c("shm_copy", SOURCE, ("-O3", flag))
    rng = np.random.default_rng(11)
    sizes = [*rng.integers(1, MAX_PIECE, 60), *(4 * 4096 * n + d for n in (1, 2) for d in (-1, 0))]
    row_bytes = MAX_PIECE + 2 * GUARD + 64
    source = rng.integers(0, 256, (len(sizes), row_bytes), dtype=np.uint8)
    target = rng.integers(0, 256, (len(sizes), row_bytes), dtype=np.uint8)
    wanted = target.copy()
    starts = GUARD + rng.integers(0, 64, (2, len(sizes)))
    for row, size in enumerate(sizes):
        here, there = starts[0, row], starts[1, row]
        wanted[row, there : there + size] = source[row, here : here + size]
    rows = np.arange(len(sizes)) * row_bytes
    ours = (source.ctypes.data + rows + starts[0]).astype(np.uint64)
    theirs = (target.ctypes.data + rows + starts[1]).astype(np.uint64)
    local, remote = (ours, theirs) if write else (theirs, ours)
    spans = Spans(local, remote, np.array(sizes, np.uint64))
    deadline = time.monotonic() + 60
    job = make_job(spans, pid=0, method=CopyMethod.MAPPING, write=write, deadline=deadline)
    job.streaming = streaming
    assert library.mooncake_run(ctypes.byref(job)) == CopyOutcome.DONE
    assert np.array_equal(target, wanted)
