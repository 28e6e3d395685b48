"""Processes by names that hold for good, and how others of the same host see that one has ended."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from pathlib import Path

import msgspec

_SYS_PIDFD_OPEN = 434
"""On all architectures; not every build of Python has ``os.pidfd_open``."""

_libc = ctypes.CDLL(None, use_errno=True)


class ProcessName(msgspec.Struct, frozen=True, array_like=True):
    """A process; pids are reused, and mean nothing on other hosts.

    Args:
        host: the running kernel and the pid namespace; empty: not known.
        pid: in there.
        started: see ``start_time``.
    """

    host: str
    pid: int
    started: int


def this_process() -> ProcessName:
    """The name of the process that asks."""
    pid = os.getpid()
    return ProcessName(_pid_namespace(), pid, start_time(pid) or 0)


def open_process(process: ProcessName) -> int | None:
    """A descriptor that is readable once a process has ended with all its threads, which the caller
    closes; None: it has ended.

    Raises:
        OSError: that can't be seen from here: it is on another host or in another pid namespace, or
            the kernel does not show it.
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
    started = start_time(process.pid)  # of what the descriptor is of, unless that has ended
    has_ended = started not in (None, process.started) or _has_ended(descriptor)
    if started == process.started and not has_ended:
        return int(descriptor)
    os.close(descriptor)
    if not has_ended:
        raise OSError(f"/proc does not show process {process.pid}")
    return None


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process.

    Together with the pid it names a process for good: pids are reused.
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
    """Of this process and the running kernel; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
