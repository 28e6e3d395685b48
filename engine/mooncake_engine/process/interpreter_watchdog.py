"""Ends a process whose Python interpreter stands still: a thread that holds its lock and does not
return, in a driver or a kernel launch, stops every other thread, the step's watchdog included.

Only something outside the interpreter can notice: a small process of its own, which this one writes
a byte to, again and again. When no byte comes for too long, it says so on standard error and sends
SIGABRT, on which ``faulthandler`` writes where all threads stand; then SIGKILL.

The child's side needs the standard library only, and runs without site packages.
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
_LONGEST_PAUSE_S = 1.0
_DUMP_S = 5.0
"""For writing down where threads stand; standard error may lead to a pipe that nobody reads."""
_STOPPED = frozenset("tT")


@contextlib.contextmanager
def watched_interpreter(timeout_s: float) -> Iterator[None]:
    """Have this process ended if its interpreter stands still within the context.

    Time in which the process was stopped (by a debugger, or with its container) does not count.

    Args:
        timeout_s: how long no other thread may get to run; 0 is for ever.
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
        start_new_session=True,  # Ctrl-C is our business
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
        except BlockingIOError:  # it is stopped, and will find bytes enough
            continue
        except BrokenPipeError:
            logger.warning(
                "the process that watches this interpreter has ended: a thread that holds its lock "
                "for ever will not be noticed"
            )
            return


def _pause_s(timeout_s: float) -> float:
    return min(timeout_s / _BEATS_PER_TIMEOUT, _LONGEST_PAUSE_S)


def watch(pid: int, timeout_s: float) -> None:
    """The child: returns when its parent ends, by itself or by us.

    Args:
        pid: of the parent, which writes to our standard input.
        timeout_s: how long it may write nothing.
    """
    pause_s = _pause_s(timeout_s)
    silent_s, last = 0.0, time.monotonic()
    while silent_s <= timeout_s:
        has_come = bool(select.select([0], [], [], pause_s)[0])
        if has_come and not os.read(0, 4096):
            return
        now = time.monotonic()
        # a look that comes late says nothing of the time before: we may have stood still, too
        passed_s, last = min(now - last, 2 * pause_s), now
        if has_come:
            silent_s = 0.0
        elif not _is_stopped(pid):
            silent_s += passed_s
    _say(
        f"mooncake-engine: error: no thread of process {pid} could run Python for {timeout_s:g} s "
        "(--step-timeout-seconds): one of them holds the interpreter's lock; the process is ended\n"
    )
    for number, wait_s in ((signal.SIGABRT, _DUMP_S), (signal.SIGKILL, 0.0)):
        if os.getppid() != pid:
            return
        os.kill(pid, number)
        _await_end(wait_s)


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it ends: the pipe will say so
        return False
    return stat.rpartition(")")[2].split()[0] in _STOPPED


def _say(words: str) -> None:
    """Write to standard error, unless that would block."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], _LONGEST_PAUSE_S)[1]:
            os.write(2, words.encode())


def _await_end(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > 0:
        if select.select([0], [], [], remaining)[0] and not os.read(0, 4096):
            return


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM):  # a stop may reach every process: the pipe decides
        signal.signal(stop, signal.SIG_IGN)
    watch(int(sys.argv[1]), float(sys.argv[2]))
