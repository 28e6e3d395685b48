"""Unambiguous names of processes, and notification of a process's end on the same host."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from pathlib import Path

import msgspec

_SYS_PIDFD_OPEN = 434
"""Number of the system call, the same on all architectures; ``os.pidfd_open`` is missing from some
builds of Python."""

_libc = ctypes.CDLL(None, use_errno=True)


class ProcessName(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a process; a pid alone does not, since pids are reused and valid on one host only.

    Args:
        host: identity of the running kernel and the pid namespace; empty: unknown.
        pid: pid in that namespace.
        started: see ``start_time``.
    """

    host: str
    pid: int
    started: int


def this_process() -> ProcessName:
    """Return the name of the calling process."""
    pid = os.getpid()
    return ProcessName(_pid_namespace(), pid, start_time(pid) or 0)


def open_process(process: ProcessName) -> int | None:
    """Return a descriptor that becomes readable once the process has ended with all its threads, or
    None if it has ended already. The caller closes the descriptor.

    Raises:
        OSError: the process can't be watched from here: it is on another host or in another pid
            namespace, or the kernel does not permit it.
    """
    here = _pid_namespace()
    if not here or process.host != here:
        raise OSError(f"process {process.pid} is of {process.host!r}, this is {here!r}")
    descriptor = _libc.syscall(_SYS_PIDFD_OPEN, process.pid, 0)
    if descriptor < 0:
        code = ctypes.get_errno()
        if code == errno.ESRCH:
            return None
        raise OSError(code, f"process {process.pid} can't be watched: {os.strerror(code)}")
    started = start_time(process.pid)  # of the descriptor's process, unless it has ended since
    has_ended = started not in (None, process.started) or _has_ended(descriptor)
    if started == process.started and not has_ended:
        return int(descriptor)
    os.close(descriptor)
    if not has_ended:
        raise OSError(f"/proc does not show process {process.pid}")
    return None


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process.

    Together with the pid, the start time identifies a process even after its pid is reused.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _pid_namespace() -> str:
    """Identity of the running kernel and of this process's pid namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
