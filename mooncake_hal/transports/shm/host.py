"""Facts about this host and its processes that decide who can reach whose memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1).value
CAP_SYS_PTRACE = 19


def host_identity() -> str:
    """Name the running kernel and the network namespace, in which abstract sockets live."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process.

    Together with the pid it names a process for good: pids are reused.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


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
