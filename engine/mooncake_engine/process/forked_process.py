"""Children that this process has forked, or that one of its children has, and left behind.

A subreaper (prctl(2), ``PR_SET_CHILD_SUBREAPER``) adopts the children of descendants that end, as
init does all others. They are then children like any: their exit status is ours to take, and until
then nobody else gets their process id.
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
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05


class ForkedProcess:
    """What ``subprocess.Popen`` is to a child of its own; any thread.

    Args:
        pid: of a child, or of one that has been adopted.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status once it has ended, which a signal's negative number stands for."""
        with self._lock:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; the exit status.

        Raises:
            subprocess.TimeoutExpired: it runs yet.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while (status := self.poll()) is None:
            if deadline is not None:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
                pause_s = min(pause_s, left_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return status

    def kill(self) -> None:
        """End it now, unless it has ended."""
        with self._lock:
            if self._status is None:  # not reaped: the process id is its own
                os.kill(self.pid, signal.SIGKILL)


class _Adoption:
    """Whether this process is a subreaper: as long as anybody needs that, and no longer, since what
    it adopts without knowing stays a zombie until it ends."""

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
    """Meanwhile, what descendants leave behind becomes a child of this process. Any thread.

    Raises:
        OSError: the system does not have that, or forbids it.
    """
    _adoption.begin()
    try:
        yield
    finally:
        _adoption.end()


def name_process(name: str) -> None:
    """What ``top`` and ``ps -o comm`` call this process, which shares its command line with others;
    15 letters of it. From its main thread."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: int | bytes) -> int:
    call = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if call is None:  # another system
        ctypes.set_errno(errno.ENOSYS)
        return -1
    argument = ctypes.c_ulong(value) if isinstance(value, int) else value
    return int(call(option, argument, 0, 0, 0))
