"""KV memory that another process can map: a memfd, mapped at a 2 MiB boundary.

The boundary lets the kernel back it with huge pages where the administrator allows it, which
spares paged attention most of its address translation misses.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from mooncake_hal.allocation import TensorAllocation
from mooncake_hal.errors import DeviceError, OutOfMemory
from mooncake_hal.transport import MemoryRegion
from mooncake_hal_cpu.facts import memory_bytes
from mooncake_hal_cpu.runtime import require_device

ALIGNMENT = 2 << 20
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class CpuMemory:
    """Allocates host memory that transports of this host can share."""

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        """See ``Memory``. Pages are taken when they are first written, not here."""
        require_device(index)
        if nbytes <= 0:
            raise DeviceError(f"an allocation needs at least one byte, {nbytes} were asked for")
        free, total = memory_bytes()
        if nbytes > free:
            raise _out_of_memory(nbytes, free, total)
        try:
            return _allocate(nbytes)
        except OSError as exc:
            raise _out_of_memory(nbytes, free, total) from exc


def _allocate(nbytes: int) -> TensorAllocation:
    mapped_bytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
    fd = os.memfd_create("mooncake-hal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mapped_bytes)
        address = _map_aligned(fd, mapped_bytes)
    except BaseException:
        os.close(fd)
        raise

    def release() -> None:
        _libc.munmap(address, mapped_bytes)
        os.close(fd)

    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    return TensorAllocation(MemoryRegion(address, nbytes, "cpu", fd, 0), tensor, release)


def _out_of_memory(nbytes: int, free: int, total: int) -> OutOfMemory:
    return OutOfMemory(
        f"{nbytes} bytes were asked for, {free} of {total} bytes are free; "
        "use fewer KV blocks or free memory on this host"
    )


def _map_aligned(fd: int, nbytes: int) -> int:
    """Map all of the file at a multiple of ALIGNMENT.

    A larger range is reserved first, the file mapped inside it, and the rest given back.

    Raises:
        OSError: the kernel refuses.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = _map(None, nbytes + ALIGNMENT, _PROT_NONE, private, -1)
    address = -(-reserved // ALIGNMENT) * ALIGNMENT
    try:
        _map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(reserved, nbytes + ALIGNMENT)
        raise
    before, after = address - reserved, reserved + ALIGNMENT - address
    if before:
        _libc.munmap(reserved, before)
    if after:
        _libc.munmap(address + nbytes, after)
    # advice: refused (EINVAL) where the kernel has no huge pages, and then small ones do
    _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    return address


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return int(found)
