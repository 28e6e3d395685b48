"""A step that does not return ends the instance, with its reason; real processes, stopped and not
killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.programs import TINY_LLAMA, ranks_of, running, serving

LIMIT_S = 6
TIMEOUT_S = 90.0


class PendingRequest:
    """A request on its own thread, since the response may never arrive."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        body = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True}
        self.response = httpx.post(
            f"{self._url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False
        )

    def answer(self) -> httpx.Response:
        """Wait for the response."""
        self._thread.join(TIMEOUT_S)
        assert self.response is not None
        return self.response


def wait_for_status(url: str, code: str) -> None:
    """Wait until health checks return this status."""
    deadline = time.monotonic() + TIMEOUT_S
    found = ""
    while time.monotonic() < deadline:
        response = httpx.get(f"{url}/ready", timeout=TIMEOUT_S, trust_env=False)
        found = response.text
        if response.status_code == 503 and response.json()["error"]["code"] == code:
            return
        time.sleep(0.05)
    raise AssertionError(f"/ready does not say {code}, but {found}")


def test_stopped_rank_ends_instance() -> None:
    options = ("--tp-size", "2", "--step-timeout-seconds", str(LIMIT_S))
    with serving(*options) as (url, program):
        stopped = ranks_of(program)[1]
        os.kill(stopped, signal.SIGSTOP)
        pending = PendingRequest(url)
        wait_for_status(url, "engine_stalled")
        late = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert late.status_code == 503
        response = pending.answer()
        assert response.status_code == 503
        assert f"a step did not return within {LIMIT_S} s" in response.text
        assert "no answer from rank" in response.text
        assert "rank 1 is stopped" in response.text
        assert program.wait() == 1
        assert "a step did not return within" in program.error_text
        assert not Path(f"/proc/{stopped}").exists()


HUNG_INSTANCE = """
import ctypes, sys, threading
from mooncake_engine import cli
from mooncake_engine.execution.worker import Worker
launch = Worker.launch
def hold_the_lock():
    ctypes.PyDLL(None).sleep(3600)
def hang(self, plan, sampled=None):
    if plan.sequences and hasattr(self, "is_warm"):
        HANG
    return launch(self, plan, sampled)
Worker.launch = hang
warm_up = Worker.warm_up
def warm(self):
    warm_up(self)
    self.is_warm = True
Worker.warm_up = warm
sys.exit(cli.main(sys.argv[1:]))
"""


@contextmanager
def hung_instance(directory: Path, hang: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A single-process instance whose first step runs ``hang``, and its URL."""
    script = directory / "hung_instance.py"
    script.write_text(HUNG_INSTANCE.replace("HANG", hang))
    argv = ["serve", "--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "64"]
    argv += ["--threads", "1", "--async-scheduling", "--step-timeout-seconds", str(LIMIT_S)]
    with subprocess.Popen(
        [sys.executable, str(script), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[1], process
        finally:
            process.kill()


def test_hung_device_in_main_process_ends_instance(tmp_path: Path) -> None:
    """The hung thread can't be stopped and the interpreter would join it: the process exits
    without."""
    with hung_instance(tmp_path, "threading.Event().wait()") as (url, process):
        response = PendingRequest(url).answer()
        assert response.status_code == 503
        assert "a step did not return within" in response.text
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "the core's thread is here" in errors


def test_step_that_hangs_holding_the_gil_ends_instance(tmp_path: Path) -> None:
    """No thread of the process can run, not even its own watchdog."""
    with hung_instance(tmp_path, "hold_the_lock()") as (url, process):
        body = {"prompt": "hello", "max_tokens": 4}
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGABRT
    assert f"could run Python for {LIMIT_S} s" in errors
    assert "in hold_the_lock" in errors


def test_instance_frozen_as_a_whole_continues(tmp_path: Path) -> None:
    """As by a debugger or a frozen container: no rank is at fault that no step returned
    meanwhile."""
    with running(
        *("mooncake_engine.cli", "serve", "--model", str(TINY_LLAMA), "--port", "0"),
        *("--num-kv-blocks", "64", "--threads", "1", "--step-timeout-seconds", "2"),
    ) as program:
        url = program.wait_for("ready ").split()[1]
        program.process.send_signal(signal.SIGSTOP)
        pending = PendingRequest(url)
        time.sleep(5.0)
        program.process.send_signal(signal.SIGCONT)
        assert pending.answer().status_code == 200
        assert httpx.get(f"{url}/ready", timeout=TIMEOUT_S, trust_env=False).status_code == 200
