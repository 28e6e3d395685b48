"""Triton kernels, a file per family, and the parts that they share.

Importing them needs triton, but neither a driver nor a device.

Integer parameters that change from call to call are marked ``do_not_specialize``: Triton would
otherwise recompile the kernel for 1 and for multiples of 16.
"""
