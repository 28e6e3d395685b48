"""Mapping memory that another process shares by descriptor."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass

from mooncake_hal.transport import MemoryRegion

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Mapping:
    """A piece of another process's memory, mapped here.

    Args:
        address: where the region begins in this process.
        base, length: what ``munmap`` takes.
    """

    address: int
    base: int
    length: int

    def close(self) -> None:
        """Unmap it; nobody may be copying."""
        _libc.munmap(self.base, self.length)


def seal(region: MemoryRegion) -> str | None:
    """Make a region's file safe for others to map; returns why that can't be done, or None.

    A file that shrinks under a mapping kills whoever touches it, so only files that can no longer
    shrink are shared.
    """
    if region.fd is None:
        return "it has no descriptor"
    try:
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as exc:
        if not _is_sealed(region.fd):
            return f"its descriptor can't be sealed against shrinking ({exc.strerror})"
    if os.fstat(region.fd).st_size < region.fd_offset + region.nbytes:
        return "its descriptor's file ends before it does"
    return None


def map_shared(fd: int, offset: int, nbytes: int) -> Mapping:
    """Map ``nbytes`` of a sealed file from ``offset`` on.

    Raises:
        OSError: the file is too short or not sealed, or the kernel refuses.
    """
    if not _is_sealed(fd) or os.fstat(fd).st_size < offset + nbytes:
        raise OSError(22, "the descriptor is not a sealed file of the promised size")
    skip = offset % mmap.ALLOCATIONGRANULARITY
    length = nbytes + skip
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    base = _libc.mmap(None, length, protection, mmap.MAP_SHARED, fd, offset - skip)
    if base == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return Mapping(base + skip, base, length)


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
