"""Triton kernels, a file per family, and what several of them share.

Importing them needs triton, but neither a driver nor a device.

Numbers that change from call to call carry ``do_not_specialize``: Triton would otherwise compile
the kernel anew for 1 and for multiples of 16.
"""
