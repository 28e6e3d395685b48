"""The host's processors as one device, and KV memory that other processes can map.

Ops complete before they return, so that streams, events and waits are trivial. KV memory is a memfd
that is mapped at a 2 MiB boundary. The kernel can then back it with huge pages if the administrator
allows it, which avoids most TLB misses of paged attention.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

import torch

from mooncake_hal.backend import DeviceInfo, Graph, MemoryInfo
from mooncake_hal.backend_parts import SynchronousRuntime, TensorAllocation, require_device
from mooncake_hal.errors import DeviceError, OutOfMemory
from mooncake_hal.host_memory import memory_bytes
from mooncake_hal.transport import MemoryRegion
from mooncake_hal_cpu.cpu_info import (
    cpu_name,
    peak_resident_bytes,
    reset_peak_resident,
    this_generation,
)
from mooncake_hal_cpu.op_replay import capture

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


class CpuRuntime(SynchronousRuntime):
    """The host's processors as device 0."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def devices(self) -> Sequence[DeviceInfo]:
        _, total = memory_bytes()
        return (DeviceInfo(0, cpu_name(), this_generation(), total),)

    def memory_info(self, index: int) -> MemoryInfo:
        self.require_device(index)
        return MemoryInfo(*memory_bytes())

    def reset_peak(self, index: int) -> None:
        self.require_device(index)
        reset_peak_resident()

    def peak_bytes(self, index: int) -> int:
        """Peak resident memory of this process, in bytes."""
        self.require_device(index)
        return peak_resident_bytes()

    def capture(self, run: Callable[[], None]) -> Graph:
        return capture(run)


class CpuMemory:
    """Allocator of host memory that transports on this host can share."""

    def allocate(self, nbytes: int, index: int) -> TensorAllocation:
        """Allocate memory; the kernel provides pages when they are first written, not here."""
        require_device("cpu", index)
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
    """Map the whole file at a multiple of ALIGNMENT.

    A larger range is reserved first, the file is mapped within it, and the rest is unmapped.

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
    # only advice: a kernel without huge pages refuses it (EINVAL), and small pages are used
    _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    return address


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if found is None or found == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return int(found)
