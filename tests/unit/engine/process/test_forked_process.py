"""A process adopts the children of a child that exited, and can reap them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mooncake_engine.process.forked_process import ForkedProcess, adopting

TIMEOUT_S = 30.0
FORKER = """
import os, sys, time
if (pid := os.fork()) == 0:
    sys.stdin.read()
    sys.exit(7)
os.write(1, f"{pid} ".encode())
"""


def start() -> tuple[ForkedProcess, int]:
    """Start an adopted process, which exits with 7 when the returned descriptor is closed."""
    until, keep = os.pipe()
    with (
        adopting(),
        subprocess.Popen(
            [sys.executable, "-c", FORKER], stdin=until, stdout=subprocess.PIPE
        ) as forker,
    ):
        os.close(until)
        assert forker.stdout is not None
        pid = int(os.read(forker.stdout.fileno(), 20))  # EOF comes once both have exited
        assert forker.wait(TIMEOUT_S) == 0
    return ForkedProcess(pid), keep


def test_exit_status_of_an_adopted_process_is_returned() -> None:
    process, keep = start()
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    os.close(keep)
    assert process.wait(TIMEOUT_S) == 7
    assert process.poll() == 7
    assert not Path(f"/proc/{process.pid}").exists()  # reaped


def test_fatal_signal_is_a_negative_status() -> None:
    process, keep = start()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.kill()  # no effect after the exit
    os.close(keep)


def test_all_waiting_threads_get_the_status() -> None:
    process, keep = start()
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(process.wait(TIMEOUT_S))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    os.close(keep)
    for thread in threads:
        thread.join()
    assert found == [7] * 4


def test_only_orphans_inside_the_block_are_adopted() -> None:
    with adopting():
        with adopting():
            pass
        process, keep = start()
    os.close(keep)
    assert process.wait(TIMEOUT_S) == 7
    done = subprocess.run(
        [sys.executable, "-c", FORKER], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    with pytest.raises(ChildProcessError):  # init's child by now
        ForkedProcess(int(done.stdout)).poll()
