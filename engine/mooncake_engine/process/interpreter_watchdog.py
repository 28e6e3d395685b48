"""Ends a process whose Python interpreter hangs: a thread that holds the GIL and does not return
from a driver or a kernel launch stops all other threads, including the step watchdog.

Only another process can detect that: a small child, to which this process writes a byte (a beat)
periodically. If none arrives within the timeout, the child reports it on standard error and sends
SIGABRT, upon which ``faulthandler`` dumps the stacks of all threads, and then SIGKILL.

The child's side uses the standard library only, and runs without site packages.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 20
"""Number of beats within the timeout."""
_MAX_PAUSE_S = 1.0
"""Maximum time between two beats, in seconds."""
_DUMP_S = 5.0
"""Seconds to dump the stacks before SIGKILL; standard error may be a pipe that is not read."""
_STOPPED = frozenset("tT")
"""Process states of a stopped process, in ``/proc/PID/stat``."""


@contextlib.contextmanager
def watched_interpreter(timeout_s: float) -> Iterator[None]:
    """Have this process killed if its interpreter hangs within the context.

    Time during which the process is stopped (by a debugger, or with its container) does not count.

    Args:
        timeout_s: seconds after which an interpreter that runs no thread counts as hung; 0 disables
            the watchdog.
    """
    if not timeout_s:
        yield
        return
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)
    pause_s = _pause_s(timeout_s)
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(timeout_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # this process handles Ctrl-C
    )
    assert child.stdin is not None
    beats = child.stdin.fileno()
    os.set_blocking(beats, False)
    closing = threading.Event()
    thread = threading.Thread(
        target=_beat, args=(beats, pause_s, closing), name="interpreter-beats", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()
        with child, contextlib.suppress(OSError):  # closes the pipe, which ends it, and waits
            child.stdin.close()


def _beat(beats: int, pause_s: float, closing: threading.Event) -> None:
    while not closing.wait(pause_s):
        try:
            os.write(beats, b".")
        except BlockingIOError:  # the child is stopped; the pipe holds enough beats
            continue
        except BrokenPipeError:
            logger.warning(
                "the process that watches this interpreter has exited: a thread that never "
                "releases the GIL will not be detected"
            )
            return


def _pause_s(timeout_s: float) -> float:
    return min(timeout_s / _BEATS_PER_TIMEOUT, _MAX_PAUSE_S)


def watch(pid: int, timeout_s: float) -> None:
    """Main of the child: watch the parent, and kill it if it hangs; returns when it has ended.

    Args:
        pid: process id of the parent, which writes the beats to standard input.
        timeout_s: maximum time without a beat, in seconds.
    """
    pause_s = _pause_s(timeout_s)
    silent_s, last = 0.0, time.monotonic()
    while silent_s <= timeout_s:
        has_come = bool(select.select([0], [], [], pause_s)[0])
        if has_come and not os.read(0, 4096):
            return
        now = time.monotonic()
        # after a late check the time before does not count: this process may have been stopped, too
        passed_s, last = min(now - last, 2 * pause_s), now
        if has_come:
            silent_s = 0.0
        elif not _is_stopped(pid):
            silent_s += passed_s
    _report(
        f"mooncake-engine: error: no thread of process {pid} could run Python for {timeout_s:g} s "
        "(--step-timeout-seconds): one of them holds the GIL; the process is killed\n"
    )
    for number, wait_s in ((signal.SIGABRT, _DUMP_S), (signal.SIGKILL, 0.0)):
        if os.getppid() != pid:
            return
        os.kill(pid, number)
        _await_end(wait_s)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the parent is exiting, which also closes the pipe
        return False
    return stat.rpartition(")")[2].split()[0] in _STOPPED


def _report(message: str) -> None:
    """Write to standard error, unless that would block."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], _MAX_PAUSE_S)[1]:
            os.write(2, message.encode())


def _await_end(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        if select.select([0], [], [], remaining)[0] and not os.read(0, 4096):
            return


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM):  # ends only when the parent closes the pipe
        signal.signal(stop, signal.SIG_IGN)
    watch(int(sys.argv[1]), float(sys.argv[2]))
