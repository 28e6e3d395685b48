"""An instance with several API workers.

Answers and metrics are those of one server, whichever worker handles the request. If any process
ends, no client waits for ever and no process is left behind.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.programs import (
    TINY_LLAMA,
    Program,
    descendants,
    is_running,
    ranks_of,
    running,
    serving,
)

TIMEOUT_S = 90.0
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 24, "temperature": 0},
    {"prompt": "the quick brown fox", "max_tokens": 16, "temperature": 0, "logprobs": 3},
    {"prompt": "one two", "max_tokens": 16, "temperature": 0.9, "seed": 7, "n": 2},
    {"prompt": "stop soon", "max_tokens": 60, "temperature": 0, "stop": ["e", "o"]},
    {"prompt": "a|b", "max_tokens": 9, "structured_outputs": {"regex": "(yes|no)+"}, "seed": 1},
    {"prompt": "too short" * 10_000, "max_tokens": 4},
]
ENDLESS = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}


def ask(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """Send a request on its own connection, which the kernel assigns to any worker."""
    return httpx.post(
        f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False
    )


def answers(url: str) -> list[Any]:
    """The answers to concurrent requests, without fields that are unique to each answer."""
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        found = [response.json() for response in pool.map(lambda body: ask(url, body), REQUESTS)]
    return [{k: v for k, v in body.items() if k not in ("id", "created")} for body in found]


def metric(url: str, start: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))


def processes_of(program: Program, module: str) -> list[int]:
    processes = descendants(program.process.pid)
    return [pid for pid, command in processes.items() if f"-m mooncake_engine.{module}" in command]


def wait_for_exit(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are still running"
        time.sleep(0.05)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def instance() -> Iterator[tuple[str, Program]]:
    with serving(
        *("--api-workers", "3", "--max-num-seqs", "4", "--max-queued-requests", "4"),
        *("--access-log", "all", "--log-format", "json"),
    ) as served:
        yield served


def test_answers_equal_one_server_and_metrics_cover_all_workers(
    instance: tuple[str, Program],
) -> None:
    url, program = instance
    with serving("--max-num-seqs", "4") as (alone, _):
        wanted = answers(alone)
    before, answered = metric(url, "vllm:generation_tokens_total"), metric(url, "http_requests")
    assert ask(url, REQUESTS[0]).status_code == 200
    assert metric(url, "vllm:generation_tokens_total") - before == REQUESTS[0]["max_tokens"]
    assert answers(url) == wanted
    # every worker reports the counts of all
    found = {metric(url, "http_requests") for _ in range(8)}
    assert found == {answered + 1 + len(REQUESTS)}
    for _ in range(16):
        assert ask(url, {"prompt": "hi", "max_tokens": 1}).status_code == 200
    workers = {f'"worker":"api-{number}"' for number in range(3)}
    wait_for(lambda: all(worker in program.error_text for worker in workers))
    reset = httpx.post(f"{url}/reset_prefix_cache", timeout=TIMEOUT_S, trust_env=False)
    assert reset.status_code == 200


def test_workers_use_little_memory(instance: tuple[str, Program]) -> None:
    """Workers don't need torch, which a library would import if it is installed."""
    workers = processes_of(instance[1], "server.api_worker")
    assert len(workers) == 3
    for pid in workers:
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


class PendingRequests:
    """Requests that never complete by themselves, on a thread each."""

    def __init__(self, url: str, num_requests: int, request_id: str) -> None:
        self.found: list[httpx.Response | httpx.HTTPError] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(url, request_id)) for _ in range(num_requests)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def responses(self) -> list[httpx.Response]:
        """The responses so far; clients of a killed process get none."""
        return [each for each in self.found if isinstance(each, httpx.Response)]

    def wait(self) -> None:
        """Wait until all requests have ended."""
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        assert len(self.found) == len(self._threads)

    def _ask(self, url: str, request_id: str) -> None:
        try:
            self.found.append(ask(url, ENDLESS, **{"x-request-id": request_id}))
        except httpx.HTTPError as exc:
            self.found.append(exc)


def num_live(url: str) -> float:
    return metric(url, "vllm:num_requests_running") + metric(url, "vllm:num_requests_waiting{")


def abort(url: str, request_id: str) -> None:
    """Abort through whichever worker accepts the connection."""
    body = {"request_id": request_id}
    assert httpx.post(f"{url}/abort", json=body, trust_env=False).status_code == 200


def test_request_limit_is_shared_by_all_workers(instance: tuple[str, Program]) -> None:
    url, program = instance
    [core] = processes_of(program, "core_process")
    os.kill(core, signal.SIGSTOP)  # no request ends meanwhile
    try:
        pending = PendingRequests(url, 12, "crowd")
        wait_for(lambda: len(pending.responses) == 4)
    finally:
        os.kill(core, signal.SIGCONT)
    pending.wait()
    statuses = sorted(response.status_code for response in pending.responses)
    assert statuses == [200] * 8 + [429] * 4
    wait_for(lambda: num_live(url) == 0)
    assert ask(url, REQUESTS[0]).status_code == 200  # the counts are released


def test_any_worker_can_abort_requests_of_all(instance: tuple[str, Program]) -> None:
    url, _ = instance
    pending = PendingRequests(url, 4, "together")
    wait_for(lambda: num_live(url) == 4)
    abort(url, "together")
    pending.wait()
    assert all("abort" in response.text for response in pending.responses)
    assert len(pending.responses) == 4
    wait_for(lambda: num_live(url) == 0)


def test_shutdown_waits_for_requests_of_all_workers() -> None:
    with serving("--api-workers", "2") as (url, program):
        processes = descendants(program.process.pid)
        found: list[httpx.Response] = []
        body = {"prompt": "x", "max_tokens": 800, "ignore_eos": True}
        threads = [threading.Thread(target=lambda: found.append(ask(url, body))) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_for(lambda: metric(url, "vllm:num_requests_running") == 8)
        for pid in [program.process.pid, *processes]:  # as a service manager does
            os.kill(pid, signal.SIGTERM)
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert [response.status_code for response in found] == [200] * 8
        assert program.wait() == 0
        wait_for_exit(processes)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("server.api_worker", "the API worker api-0 killed by SIGKILL"),
        ("core_process", "the core's process killed by SIGKILL"),
        ("", "killed by SIGKILL"),  # a rank
    ],
)
def test_killing_any_process_ends_instance_with_reason(module: str, reason: str) -> None:
    with serving("--api-workers", "2", "--tp-size", "2") as (url, program):
        processes = descendants(program.process.pid)
        pending = PendingRequests(url, 6, "cut")
        wait_for(lambda: num_live(url) == 6)
        victims = processes_of(program, module) if module else ranks_of(program)
        os.kill(victims[0], signal.SIGKILL)
        pending.wait()
        assert program.wait() == 1
        failed = pending.responses
        assert len(failed) == 6 or module == "server.api_worker"
        assert all(each.status_code == 503 and reason in each.text for each in failed)
        assert reason in program.error_text
        wait_for_exit(processes)


def test_killed_parent_ends_all_processes() -> None:
    with serving("--api-workers", "2", "--tp-size", "2") as (_, program):
        processes = descendants(program.process.pid)
        assert len(processes) >= 5
        program.process.kill()
        wait_for_exit(processes)


def test_invalid_options_are_rejected_as_by_one_server(tmp_path: Path) -> None:
    argv = ("mooncake_engine.cli", "serve", "--port", "0", "--api-workers", "2")
    with running(*argv, "--model", str(tmp_path)) as program:
        assert program.wait() != 0
        assert "config.json" in program.error_text
        assert "Traceback" not in program.error_text
    with running(*argv, "--model", "examples/tiny-llama", "--no-core-process") as program:
        assert program.wait() == 2
        assert "remove --no-core-process" in program.error_text


def test_pair_with_workers_gives_same_answers() -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0}

    def chat(url: str) -> tuple[str, str]:
        response = httpx.post(
            f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S, trust_env=False
        )
        choice = response.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    with serving() as (url, _):
        wanted = chat(url)
    argv = ["up", "--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "512"]
    with running("mooncake_engine.cli", *argv, "--api-workers", "2") as program:
        url = program.wait_for("curl -N ").split()[2].removesuffix("/v1/chat/completions")
        assert {chat(url) for _ in range(8)} == {wanted}
        processes = descendants(program.process.pid)
        assert sum("api_worker " in command for command in processes.values()) == 4
        assert program.end() == 0
        wait_for_exit(processes)
