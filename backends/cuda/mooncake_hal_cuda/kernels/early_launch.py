"""Programmatic dependent launch: kernels that are launched while their predecessor still runs.

A kernel of a single stream's decode step takes a few microseconds, of which the launch is a part. A
kernel that is launched early (CUDA Programming Guide, programmatic dependent launch) is on the
device when its predecessor ends, and then waits for it, with all of its stores.
"""

import triton
import triton.language as tl


@triton.jit
def await_predecessor(IS_EARLY: tl.constexpr):
    """Let the next kernel be launched early, and wait for the previous one to end.

    What the next kernel does before its own wait may overlap with this kernel and with those that
    this one waits for. It must not read what any of them writes. Without IS_EARLY, the next kernel
    waits for this one by itself.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
