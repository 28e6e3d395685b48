"""``mooncake-engine up`` starts everything with one command, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.programs import TINY_LLAMA, Program, descendants, is_running, running

OPTIONS = ("--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "256")


@pytest.fixture
def up() -> Iterator[Program]:
    with running("mooncake_engine.cli", "up", *OPTIONS) as program:
        program.wait_for("curl -N http://127.0.0.1:")
        program.wait_for("Prefill reads the whole prompt at once and fills the KV cache.")
        yield program
        program.close()


def have_exited(pids: dict[int, str], timeout_s: float = 15.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_and_leaves_no_process(up: Program, number: signal.Signals) -> None:
    children = descendants(up.process.pid)
    assert len([command for command in children.values() if "cli serve" in command]) == 2
    assert len([command for command in children.values() if "mooncake_proxy" in command]) == 1
    url = next(line for line in up.lines if "curl" in line).split()[2]
    body = {"messages": [{"role": "user", "content": "Thank you!"}], "temperature": 0}
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        answer = json.load(response)
    assert answer["choices"][0]["message"]["content"] == "You are welcome. Enjoy your tea. 🍵"
    assert up.end(number) == 0
    assert have_exited(children)


def test_roles_differ_and_every_process_logs_json() -> None:
    by_role = ("--prefill-args=--block-size 8 --tp-size 2", "--decode-args=--enforce-eager")
    logs = ("--log-format", "json", "--kv-pool", "dram=16MiB,chunk=64")
    objectives = ("--slo-ttft", "500", "--slo-tbt", "50.5")
    with running("mooncake_engine.cli", "up", *OPTIONS, *by_role, *logs, *objectives) as program:
        program.wait_for("Prefill reads the whole prompt at once and fills the KV cache.")
        everything = descendants(program.process.pid).values()
        commands = [command for command in everything if "cli serve" in command]
        program.close()
    lines = [json.loads(line) for line in program.errors]
    assert {line.get("process") for line in lines} >= {"prefill-0", "decode-0", "proxy", "kv-store"}
    levels = {line["level"] for line in lines if "level" in line}  # access-log lines have a status
    assert levels <= {"INFO", "WARNING"}
    assert any("logger" in line for line in lines if line["process"] == "prefill-0")
    [proxy] = [command for command in everything if "mooncake_proxy" in command]
    assert "--slo-ttft 500 --slo-tbt 50.5" in proxy
    [prefill] = [command for command in commands if "--role prefill" in command]
    [decode] = [command for command in commands if "--role decode" in command]
    assert ("--tp-size 2" in prefill, "--tp-size 2" in decode) == (True, False)
    assert ("--enforce-eager" in prefill, "--enforce-eager" in decode) == (False, True)


def test_up_passes_keys_to_the_proxy_and_says_how_to_ask_the_pool(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef\n")
    options = (f"--proxy-args=--api-key-file {keys}", "--kv-pool", "dram=16MiB,chunk=64")
    with running("mooncake_engine.cli", "up", *OPTIONS, *options) as program:
        url = program.wait_for("curl http://127.0.0.1:").split()[1]
        headers = {"Authorization": "Bearer sk-0123456789abcdef"}
        with urllib.request.urlopen(urllib.request.Request(url, None, headers), timeout=20) as got:
            assert json.load(got)["data"][0]["id"] == "tiny-llama"
        command = program.wait_for("the pool: mooncake-kv ").split()[3:]
        asked = [sys.executable, "-m", "mooncake_kv", *command]
        stats = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        assert stats.returncode == 0, stats.stderr
        program.close()


def test_dead_child_stops_the_others_with_its_reason(up: Program) -> None:
    children = descendants(up.process.pid)
    victim = next(pid for pid, command in children.items() if "--role decode" in command)
    os.kill(victim, signal.SIGKILL)
    assert up.wait(30) == 1
    assert have_exited(children)
    assert "mooncake-engine: error: decode-0 died, killed by SIGKILL" in up.error_text


def test_dead_child_is_restarted_while_the_others_run() -> None:
    with running("mooncake_engine.cli", "up", *OPTIONS, "--max-restarts", "1") as up:
        url = up.wait_for("curl -N http://127.0.0.1:").split()[2]
        up.wait_for("Prefill reads the whole prompt at once and fills the KV cache.")
        children = descendants(up.process.pid)
        victim = next(pid for pid, command in children.items() if "--role decode" in command)
        os.kill(victim, signal.SIGKILL)
        until(lambda: "restarting it in 1 s (restart 1 of 1)" in up.error_text)
        until(lambda: is_answered(url))
        again = {
            pid: command
            for pid, command in descendants(up.process.pid).items()
            if pid not in children and "interpreter_watchdog" not in command
        }
        assert len(again) == 1
        assert have_exited({victim: ""})
        os.kill(next(iter(again)), signal.SIGKILL)
        assert up.wait(30) == 1
    assert "mooncake-engine: error: decode-0 died, killed by SIGKILL" in up.error_text
    assert have_exited(children)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_answered(url: str) -> bool:
    body = {"messages": [{"role": "user", "content": "Thank you!"}], "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            answer = json.load(response)
    except (urllib.error.HTTPError, ConnectionError):
        return False
    return bool(answer["choices"][0]["message"]["content"].startswith("You are welcome."))


def test_children_exit_when_launcher_is_killed(up: Program) -> None:
    children = descendants(up.process.pid)
    up.process.kill()
    assert have_exited(children)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prefill", "0"), "argument --prefill: must be a number, at least 1, got '0'"),
        (("--block-size", "0"), "block_size must be at least 1"),
    ],
)
def test_invalid_configuration_starts_no_child(options: tuple[str, ...], words: str) -> None:
    with running("mooncake_engine.cli", "up", *OPTIONS, *options) as program:
        assert program.wait() == 2
    assert words in program.error_text
    assert "│" not in program.error_text  # no child has logged anything
