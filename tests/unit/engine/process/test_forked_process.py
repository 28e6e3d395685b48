"""Children of a child that has ended are ours: their ends, and their exit status."""

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

PATIENCE_S = 30.0
FORKER = """
import os, sys, time
if (pid := os.fork()) == 0:
    sys.stdin.read()
    sys.exit(7)
os.write(1, f"{pid} ".encode())
"""


def start() -> tuple[ForkedProcess, int]:
    """An adopted process that runs until what is returned with it is closed; it exits with 7."""
    until, keep = os.pipe()
    with (
        adopting(),
        subprocess.Popen(
            [sys.executable, "-c", FORKER], stdin=until, stdout=subprocess.PIPE
        ) as forker,
    ):
        os.close(until)
        assert forker.stdout is not None
        pid = int(os.read(forker.stdout.fileno(), 20))  # its end comes when both have ended
        assert forker.wait(PATIENCE_S) == 0
    return ForkedProcess(pid), keep


def test_its_exit_status_is_ours_to_take() -> None:
    process, keep = start()
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    os.close(keep)
    assert process.wait(PATIENCE_S) == 7
    assert process.poll() == 7
    assert not Path(f"/proc/{process.pid}").exists()  # reaped


def test_a_signal_that_ends_it_is_a_negative_status() -> None:
    process, keep = start()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.kill()  # of one that has ended: nothing
    os.close(keep)


def test_all_threads_that_wait_get_its_status() -> None:
    process, keep = start()
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(process.wait(PATIENCE_S))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.01)
    os.close(keep)
    for thread in threads:
        thread.join()
    assert found == [7] * 4


def test_only_what_is_left_behind_meanwhile_is_adopted() -> None:
    with adopting():
        with adopting():
            pass
        process, keep = start()
    os.close(keep)
    assert process.wait(PATIENCE_S) == 7
    done = subprocess.run(
        [sys.executable, "-c", FORKER], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    with pytest.raises(ChildProcessError):  # somebody else's by now
        ForkedProcess(int(done.stdout)).poll()
