"""Tests ``make up ENGINE=vllm`` with the curl command that it prints, and with OpenAI's client."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from vllm_environment import CACHE, ROOT
from vllm_requests import joined
from vllm_serving import family, free_port

LEFT_S = 60.0
"""Seconds within which all processes must end."""
# Runs in vLLM's environment, since vLLM depends on OpenAI's client.
CLIENT = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
common = {"model": "tiny-llama", "prompt": "A language model answers in two", "temperature": 0}
whole = client.completions.create(max_tokens=40, **common)
pieces = list(client.completions.create(max_tokens=40, stream=True, **common))
texts = [piece.choices[0].text for piece in pieces if piece.choices]
assert len(texts) > 10, texts
assert "".join(texts) == whole.choices[0].text, (texts, whole)
assert whole.usage.completion_tokens == 40, whole.usage
print(whole.choices[0].text)
"""


def check_up(python: Path, timeout_s: float) -> list[str]:
    """Start it, query it, stop it with Ctrl-C; returns the problems.

    Args:
        python: interpreter of vLLM's environment.
        timeout_s: seconds for it to start.
    """
    port, log = free_port(), CACHE / "vllm-up.log"
    command = [sys.executable, "-u", "ci/up_vllm.py", "--port", str(port)]
    with log.open("w") as output:
        up = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
    try:
        problems = ask_it(python, f"http://127.0.0.1:{port}", *answered(up, log, timeout_s))
    finally:
        started = family(up.pid)
        up.send_signal(signal.SIGINT)
        try:
            status = up.wait(LEFT_S)
        except subprocess.TimeoutExpired:
            up.kill()
            status = up.wait()
    if status:
        problems.append(f"up: Ctrl-C ended it with {status}, wanted 0")
    time.sleep(1)
    left = [pid for pid in started if is_running(pid)]
    if left or len(started) < 5:  # two instances of two processes and more, and a proxy
        problems.append(f"up: {len(left)} of {len(started)} processes are still running: {left}")
    verdict = "WRONG" if left else "ok"
    print(f"up            {f'{len(started)} processes ended':34} {verdict}", flush=True)
    return problems


def answered(up: subprocess.Popen[bytes], log: Path, timeout_s: float) -> tuple[str, str]:
    """The curl command that it prints, and the answer after it; empty if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and up.poll() is None:
        _, found, rest = log.read_text().partition("\ncurl ")
        line, _, answer = rest.partition("\n")
        if found and answer.strip() and answer.endswith("\n"):
            return f"curl {line}", answer.strip("\n")
        time.sleep(0.5)
    return "", log.read_text()[-300:]


def ask_it(python: Path, url: str, line: str, answer: str) -> list[str]:
    """Query it with the printed curl command, and with OpenAI's client; returns the problems."""
    if not line:
        return [f"up: did not answer: {answer}"]
    curl = subprocess.run(
        [*shlex.split(line), "-sS"], capture_output=True, text=True, timeout=300, check=False
    )
    events = [text for text in curl.stdout.split("\n") if text.startswith("data: {")]
    streamed, _ = joined([json.loads(event.removeprefix("data: ")) for event in events])
    problems = []
    if streamed != answer or "[DONE]" not in curl.stdout:
        problems.append(f"up: curl's stream says {streamed!r:.120}, wanted {answer!r:.120}")
    print(f"up            {'curl, streamed':34} {'WRONG' if problems else 'ok'}", flush=True)
    client = subprocess.run(
        [python, "-c", CLIENT, url], capture_output=True, text=True, timeout=300, check=False
    )
    if client.returncode:
        problems.append(f"up: OpenAI's client: {client.stderr.strip()[-300:]}")
    verdict = "WRONG" if client.returncode else "ok"
    print(f"up            {'OpenAI client, whole and streamed':34} {verdict}", flush=True)
    return problems


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
