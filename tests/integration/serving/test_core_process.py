"""An instance whose core runs in its own process.

Answers and metrics stay the same. If any process exits or freezes, no client waits for ever and no
process is left behind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from support.programs import Program, descendants, is_running, ranks_of, running, serving

TIMEOUT_S = 90.0
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 24, "temperature": 0},
    {"prompt": "the quick brown fox", "max_tokens": 16, "temperature": 0, "logprobs": 3},
    {"prompt": "one two", "max_tokens": 16, "temperature": 0.9, "seed": 7, "n": 2},
    {"prompt": "stop soon", "max_tokens": 60, "temperature": 0, "stop": ["e", "o"]},
    {"prompt": "too short" * 10_000, "max_tokens": 4},
]


def ask(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)


def answers(url: str) -> list[Any]:
    """The answers to concurrent requests, without fields that are unique to each answer."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        found = [response.json() for response in pool.map(lambda body: ask(url, body), REQUESTS)]
    return [{k: v for k, v in body.items() if k not in ("id", "created")} for body in found]


def generated(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    name = "vllm:generation_tokens_total"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def core_of(program: Program) -> int:
    processes, ranks = descendants(program.process.pid), ranks_of(program)
    found = [pid for pid, command in processes.items() if "core_process" in command]
    [core] = (pid for pid in found if pid not in ranks)  # ranks are forked from the core
    return core


def wait_for_exit(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are still running"
        time.sleep(0.05)


def test_same_answers_and_metrics_and_graceful_shutdown() -> None:
    with serving() as (url, _):
        alone = answers(url)
    with serving("--core-process") as (url, program):
        assert "libtorch" not in Path(f"/proc/{program.process.pid}/maps").read_text()
        before = generated(url)
        assert ask(url, REQUESTS[0]).status_code == 200
        assert generated(url) - before == REQUESTS[0]["max_tokens"]
        assert answers(url) == alone
        reset = httpx.post(f"{url}/reset_prefix_cache", timeout=TIMEOUT_S, trust_env=False)
        assert reset.status_code == 200
        processes = descendants(program.process.pid)
        assert processes
        program.process.terminate()
        assert program.wait() == 0
        wait_for_exit(processes)


def test_dead_core_ends_instance_with_reason() -> None:
    with serving("--core-process", "--tp-size", "2") as (url, program):
        processes = descendants(program.process.pid)
        pending: list[httpx.Response] = []
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
        thread = threading.Thread(target=lambda: pending.append(ask(url, body)))
        thread.start()
        time.sleep(0.3)
        os.kill(core_of(program), signal.SIGKILL)
        thread.join(TIMEOUT_S)
        assert pending[0].status_code == 503
        assert "the core's process killed by SIGKILL" in pending[0].text
        assert program.wait() == 1
        wait_for_exit(processes)


def test_dead_server_ends_core_and_ranks() -> None:
    with serving("--core-process", "--tp-size", "2") as (_, program):
        processes = descendants(program.process.pid)
        assert len(processes) >= 3
        program.process.kill()
        wait_for_exit(processes)


def test_frozen_core_is_killed() -> None:
    """Stopped as a whole, as if a thread held the GIL for ever: its own watchdog reports
    nothing."""
    with serving("--core-process", "--step-timeout-seconds", "4") as (url, program):
        core = core_of(program)
        os.kill(core, signal.SIGSTOP)
        response = ask(url, REQUESTS[0])
        assert response.status_code == 503
        assert "a step did not return within 5 s" in response.text
        assert program.wait() == 1
        wait_for_exit({core})


def test_load_errors_are_reported_as_without_core_process(tmp_path: Path) -> None:
    with running(
        *("mooncake_engine.cli", "serve", "--model", str(tmp_path), "--port", "0"),
        "--core-process",
    ) as program:
        assert program.wait() != 0
        assert "config.json" in program.error_text
        assert "Traceback" not in program.error_text
