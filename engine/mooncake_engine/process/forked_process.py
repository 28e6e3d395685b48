"""Handles for forked children of this process, and for orphans that it adopts.

A subreaper (prctl(2), ``PR_SET_CHILD_SUBREAPER``) adopts the children of descendants that exit, in
place of init. They are then ordinary children of this process, which reaps their exit status; until
then their process ids can't be reused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_MIN_PAUSE_S = 0.0005
_MAX_PAUSE_S = 0.05


class ForkedProcess:
    """A forked or adopted child, with an interface like ``subprocess.Popen``. Thread-safe.

    Args:
        pid: process id of the child.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal; None while the child is running."""
        with self._lock:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the child to exit; returns its exit status.

        Raises:
            subprocess.TimeoutExpired: the child is still running.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _MIN_PAUSE_S
        while (status := self.poll()) is None:
            if deadline is not None:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
                pause_s = min(pause_s, left_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        return status

    def kill(self) -> None:
        """Kill the child, unless it has exited."""
        with self._lock:
            if self._status is None:  # not reaped, so the process id is still the child's
                os.kill(self.pid, signal.SIGKILL)


class _Adoption:
    """Counts the users of the subreaper setting of this process. The process is a subreaper only
    while there are any, since orphans that it adopts unknowingly stay zombies until it exits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if self._num_users == 0:
                before = ctypes.c_int()
                _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
                self._was_on = before.value != 0
                if _prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
                    raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
            self._num_users += 1

    def end(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                _prctl(_PR_SET_CHILD_SUBREAPER, int(self._was_on))


_adoption = _Adoption()


@contextmanager
def adopting() -> Iterator[None]:
    """Have this process adopt the orphans of its descendants within the context. Any thread.

    Raises:
        OSError: the system does not support subreapers, or forbids them.
    """
    _adoption.begin()
    try:
        yield
    finally:
        _adoption.end()


def name_process(name: str) -> None:
    """Set the name that ``top`` and ``ps -o comm`` show for this process, since forked processes
    share a command line. The kernel keeps 15 characters. Call it on the main thread."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> int:
    call = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if call is None:  # not Linux
        ctypes.set_errno(errno.ENOSYS)
        return -1
    argument = ctypes.c_ulong(value) if isinstance(value, int) else value
    return int(call(option, argument, 0, 0, 0))
