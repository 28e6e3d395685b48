"""Programmatic dependent launch: kernels that are launched while their predecessor still runs.

A kernel of a decode step takes a few microseconds, of which the launch is a large part. A kernel
that is launched early (CUDA Programming Guide, programmatic dependent launch) is on the device when
its predecessor ends, and then waits for it, with all of its stores, before it does anything else.
"""

import triton
import triton.language as tl


@triton.jit
def await_predecessor(IS_EARLY: tl.constexpr):
    """Wait for the previous kernel to end, and let the next one be launched early.

    In this order: what the next kernel does before its own wait may then rely on every kernel but
    this one. Without IS_EARLY, a launch waits for its predecessor by itself.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
