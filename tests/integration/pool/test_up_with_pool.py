"""``mooncake-engine up --kv-pool``: a conversation over a deployment with its own store."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable

from support.programs import TINY_LLAMA, Program, descendants, running

OPTIONS = ("--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "256", "--threads", "1")
TURN = "What is prefill, and what is decoding? Tell me of both, and of what lies between them. "


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def complete(url: str, prompt: str) -> str:
    """The deployment's completion of a text."""
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 64, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["choices"][0]["text"]


def counted(url: str, name: str) -> float:
    """The sum over all labels of a counter of an instance's pool."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    lines = re.findall(rf"^mooncake:kv_pool_{name}(?:_total)?{{.*}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, lines))


def instances(up: Program) -> dict[str, str]:
    """URLs by role, from the log of a deployment with one instance of each role."""
    found = re.findall(r"(prefill|decode)-0 │ ready (\S+)", up.error_text)
    return dict(found)


def store_targets(url: str) -> list[str]:
    """URLs of the stores' metrics that the proxy tells Prometheus."""
    with urllib.request.urlopen(f"{url}/metrics/targets", timeout=10) as response:
        found = json.load(response)
    return [
        f"http://{each['targets'][0]}{each['labels']['__metrics_path__']}"
        for each in found
        if each["labels"]["role"] == "store"
    ]


def store_pid(up: Program) -> int | None:
    commands = descendants(up.process.pid).items()
    return next((pid for pid, command in commands if "mooncake_kv store" in command), None)


def test_second_turn_loads_answer_and_dead_store_is_restarted() -> None:
    pool = ("--kv-pool", "dram=64MiB,chunk=32,load=always")
    with running("mooncake_engine.cli", "up", *OPTIONS, *pool) as up:
        url = up.wait_for("curl -N http://127.0.0.1:").split()[2].split("/v1")[0]
        up.wait_for("Prefill reads the whole prompt at once and fills the KV cache.")
        urls = instances(up)
        completed: dict[str, str] = {}

        def converses() -> bool:
            """Run two turns; returns whether the prefill instance has loaded KV that only the
            decode instance had computed."""
            first = f"{len(completed)} {TURN}"
            completed[first] = complete(url, first)
            until(lambda: counted(urls["decode"], "saves_in_flight") == 0)
            second = first + completed[first] + TURN
            completed[second] = complete(url, second)
            return counted(urls["prefill"], "num_loaded_chunks") > 0

        assert converses()
        [metrics] = store_targets(url)
        with urllib.request.urlopen(metrics, timeout=10) as page:
            [puts] = re.findall(r"mooncake_store_puts_total (\d+)\n", page.read().decode())
        assert int(puts) > 0

        first_store = store_pid(up)
        assert first_store is not None
        os.kill(first_store, signal.SIGKILL)
        assert {prompt: complete(url, prompt) for prompt in completed} == completed
        until(lambda: store_pid(up) not in (None, first_store))
        until(lambda: up.error_text.count(f"metrics are at {metrics}\n") == 2)
        saved = counted(urls["decode"], "num_saved_chunks")

        def saves_again() -> bool:
            converses()
            return counted(urls["decode"], "num_saved_chunks") > saved

        until(saves_again)
        assert {prompt: complete(url, prompt) for prompt in completed} == completed
        assert up.end(signal.SIGINT) == 0
    assert "kv-store died, killed by SIGKILL" in up.error_text
    assert "restarting it in 1 s (restart 1)" in up.error_text


def test_unavailable_store_fails_start_at_once() -> None:
    pool = ("--kv-pool", "dram=64MiB,ssd=/proc/nowhere:1GiB")
    with running("mooncake_engine.cli", "up", *OPTIONS, *pool) as up:
        assert up.wait(60) == 1
    assert "mooncake-engine: error: kv-store died, " in up.error_text
    last = up.error_text.splitlines()[-1]
    assert "/proc/nowhere can't be used for a store: there is no such directory" in last
