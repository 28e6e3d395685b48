"""A hung interpreter is aborted; a suspended or busy one is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT_S = 60.0
LIMIT_S = 1.0
LONG_LIMIT_S = 3.0
"""Timeout of processes that must survive: a busy machine may deschedule them for a second."""

BEGIN = """
import ctypes, sys, threading, time
from mooncake_engine.process.interpreter_watchdog import watched_interpreter
def hold_the_lock():
    ctypes.PyDLL(None).sleep(600)
with watched_interpreter(float(sys.argv[1])):
    print("watched", flush=True)
"""
HANGING = BEGIN + "    threading.Thread(target=hold_the_lock).start(); time.sleep(600)\n"
BUSY = BEGIN + "    sum(range(10**7)); time.sleep(1.5 * float(sys.argv[1]))\nprint('whole')\n"
WAITING = BEGIN + "    sys.stdin.read()\nprint('whole')\n"


def start(script: str, limit_s: float = LIMIT_S) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(limit_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "watched\n"
    return process


def watcher_of(process: subprocess.Popen[str]) -> int:
    """Return the id of the process that watches this one."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(found) == 1
    return int(found[0])


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_thread_that_holds_the_gil_is_named_and_its_process_aborted() -> None:
    with start(HANGING) as process:
        watcher = watcher_of(process)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGABRT
    assert f"process {process.pid} could run Python for 1 s" in errors
    assert "in hold_the_lock" in errors
    assert is_gone(watcher)


def test_hung_process_with_a_full_stderr_pipe_is_killed() -> None:
    script = "import os\nos.set_blocking(2, False)\n"
    script += "try:\n    while os.write(2, b'x'): pass\nexcept BlockingIOError: pass\n"
    script += "os.set_blocking(2, True)\n" + HANGING
    with start(script) as process:
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert process.stderr is not None
        process.stderr.close()


def test_busy_process_is_not_aborted() -> None:
    with start(BUSY, LONG_LIMIT_S) as process:
        watcher = watcher_of(process)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output, errors) == (0, "whole\n", "")
    assert is_gone(watcher)


def test_suspended_process_is_not_aborted() -> None:
    with start(WAITING, LONG_LIMIT_S) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LONG_LIMIT_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(LIMIT_S / 2)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, "whole\n")


def test_watcher_exits_when_its_process_is_killed() -> None:
    with start(WAITING) as process:
        watcher = watcher_of(process)
        process.kill()
    assert is_gone(watcher)


def test_watcher_ignores_stop_signals() -> None:
    """A service manager sends them to every process; the watched process decides when to exit."""
    with start(WAITING, LONG_LIMIT_S) as process:
        watcher = watcher_of(process)
        time.sleep(LIMIT_S / 2)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(watcher, number)
        time.sleep(LIMIT_S / 2)
        assert watcher_of(process) == watcher
        assert "Z" not in Path(f"/proc/{watcher}/stat").read_text().rpartition(")")[2].split()[0]
        process.communicate(timeout=TIMEOUT_S)
    assert is_gone(watcher)


def test_killed_watcher_is_reported() -> None:
    with start(WAITING) as process:
        os.kill(watcher_of(process), signal.SIGKILL)
        time.sleep(LIMIT_S)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, "whole\n")
    assert "will not be detected" in errors
