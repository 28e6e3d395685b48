"""What decides which process reaches whose memory, and mappings of memory that has a descriptor."""

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
    """Return yama's restriction on reading other processes' memory; 0 is none."""
    try:
        return int(PTRACE_SCOPE.read_text())
    except FileNotFoundError:
        return 0


def describe_ptrace_scope() -> str:
    """Say in words what that restriction means for this transport."""
    scope = ptrace_scope()
    if scope == 0 or _has_ptrace_capability():
        return "process_vm_readv and shared mappings"
    if scope == 1:
        return "shared mappings; process_vm_readv between processes that allow it (ptrace_scope 1)"
    return (
        f"shared mappings only: {PTRACE_SCOPE} is {scope}, which forbids process_vm_readv; "
        "memory without a descriptor goes by tcp"
    )


def allow_peers_to_reach_us() -> None:
    """Under ptrace_scope 1, let processes of the same user reach this one's memory.

    The kernel's other checks (same user, dumpable) stay as they are. Without it only ancestors
    could, and no instance is another's ancestor.
    """
    if ptrace_scope() == 1:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def explain_refused_call(pid: int) -> str:
    """Say why process_vm_readv on a live process was refused, and what to do."""
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
    """A piece of another process's memory, mapped here.

    Args:
        address: where the region begins in this process.
        base, length: what ``munmap`` takes.
    """

    address: int
    base: int
    length: int

    def close(self) -> None:
        """Unmap it; no copy may be running."""
        _libc.munmap(self.base, self.length)


def seal_size(region: MemoryRegion) -> str | None:
    """Make a region's file safe for others to map; returns why that can't be done, or None.

    A file that shrinks under a mapping kills the process that touches it, so only files that can
    no longer shrink are shared.
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
    return SharedMapping(base + skip, base, length)


def _is_sealed(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
