"""An interpreter that stands still ends its process; one that was stopped, or is busy, does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 60.0
LIMIT_S = 1.0
LONG_LIMIT_S = 3.0
"""Of one that is to go on: a busy machine may let it wait for a second."""

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
    """The process that watches this one."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(found) == 1
    return int(found[0])


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


def test_a_thread_that_keeps_the_lock_ends_the_process_and_is_named() -> None:
    with start(HANGING) as process:
        watcher = watcher_of(process)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGABRT
    assert f"process {process.pid} could run Python for 1 s" in errors
    assert "in hold_the_lock" in errors
    assert is_gone(watcher)


def test_a_process_whose_standard_error_is_not_read_is_ended_all_the_same() -> None:
    script = "import os\nos.set_blocking(2, False)\n"
    script += "try:\n    while os.write(2, b'x'): pass\nexcept BlockingIOError: pass\n"
    script += "os.set_blocking(2, True)\n" + HANGING
    with start(script) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
        assert process.stderr is not None
        process.stderr.close()


def test_a_process_that_works_or_waits_goes_on() -> None:
    with start(BUSY, LONG_LIMIT_S) as process:
        watcher = watcher_of(process)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output, errors) == (0, "whole\n", "")
    assert is_gone(watcher)


def test_a_process_that_was_stopped_goes_on() -> None:
    with start(WAITING, LONG_LIMIT_S) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LONG_LIMIT_S)
        process.send_signal(signal.SIGCONT)
        time.sleep(LIMIT_S / 2)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (0, "whole\n")


def test_the_watcher_ends_with_a_process_that_was_killed() -> None:
    with start(WAITING) as process:
        watcher = watcher_of(process)
        process.kill()
    assert is_gone(watcher)


def test_a_stop_that_reaches_the_watcher_too_leaves_the_end_to_the_process() -> None:
    """As a service manager's does, which signals every process."""
    with start(WAITING, LONG_LIMIT_S) as process:
        watcher = watcher_of(process)
        time.sleep(LIMIT_S / 2)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(watcher, number)
        time.sleep(LIMIT_S / 2)
        assert watcher_of(process) == watcher
        assert "Z" not in Path(f"/proc/{watcher}/stat").read_text().rpartition(")")[2].split()[0]
        process.communicate(timeout=PATIENCE_S)
    assert is_gone(watcher)


def test_a_watcher_that_was_killed_is_missed() -> None:
    with start(WAITING) as process:
        os.kill(watcher_of(process), signal.SIGKILL)
        time.sleep(LIMIT_S)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (0, "whole\n")
    assert "will not be detected" in errors
