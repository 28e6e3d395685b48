"""Access to other processes' memory: the kernel's restrictions, and mappings of shared
descriptors."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from mooncake_hal.transport import MemoryRegion

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value
CAP_SYS_PTRACE = 19


def ptrace_scope() -> int:
    """Return Yama's restriction of access to other processes' memory; 0 means none."""
    try:
        return int(PTRACE_SCOPE.read_text())
    except FileNotFoundError:
        return 0


def describe_ptrace_scope() -> str:
    """Describe which ways of copying the restriction permits."""
    scope = ptrace_scope()
    if scope == 0 or _has_ptrace_capability():
        return "process_vm_readv and shared mappings"
    if scope == 1:
        return "shared mappings; process_vm_readv between processes that allow it (ptrace_scope 1)"
    return (
        f"shared mappings only: {PTRACE_SCOPE} is {scope}, which forbids process_vm_readv; "
        "memory without a descriptor is moved by tcp"
    )


def allow_peer_access() -> None:
    """Under ptrace_scope 1, permit processes of the same user to access this process's memory.

    The kernel's other checks (same user, dumpable) still apply. Without this, only ancestors have
    access, and instances are not each other's ancestors.
    """
    if ptrace_scope() == 1:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def explain_refused_call(pid: int) -> str:
    """Explain why process_vm_readv on a live process was denied, and what to do."""
    scope = ptrace_scope()
    if scope >= 2:
        return (
            f"the kernel forbids process_vm_readv ({PTRACE_SCOPE} is {scope}); set it to 1 or 0, "
            "give both processes CAP_SYS_PTRACE, or use tcp"
        )
    return (
        f"the kernel forbids process_vm_readv on process {pid}: run both as one user and in one "
        "user namespace, allow the call in the container's seccomp profile, or use tcp"
    )


def _has_ptrace_capability() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)
    return False


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
class SharedMapping:
    """A region of another process's memory that is mapped into this process.

    Args:
        address: address of the region in this process.
        base, length: the arguments of ``munmap``.
    """

    address: int
    base: int
    length: int

    def close(self) -> None:
        """Unmap the region; no copy may be running."""
        _libc.munmap(self.base, self.length)


def seal_size(region: MemoryRegion) -> str | None:
    """Seal a region's file against shrinking, so that peers can map it safely; returns why that is
    not possible, or None.

    Accessing a mapping whose file has shrunk kills the process, so only sealed files are shared.
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


def map_shared(fd: int, offset: int, nbytes: int) -> SharedMapping:
    """Map ``nbytes`` of a sealed file from ``offset`` on.

    Raises:
        OSError: the file is too short or not sealed, or the mapping fails.
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
    return SharedMapping(base + skip, base, length)


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
