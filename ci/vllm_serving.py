"""A real vLLM (its CPU build) serving the example model, and what is asked of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_environment import CACHE, Skip, install, run

ROOT = Path(__file__).resolve().parent.parent
PROXY_LOG = CACHE / "vllm-proxy.log"
MODEL = CACHE / "tiny-llama-wide-heads"
EXAMPLE = ROOT / "examples" / "tiny-llama"
# Machines that compile while others work on them take their time over a first answer.
ANSWER_TIMEOUT_S = 600
Json = dict[str, Any]

# The smallest head of vLLM's CPU attention is 32, the example's is 16. Zeros make it wider: each
# rotary pair j moves to the place 2j, which turns as fast there, and the queries make up for the
# smaller softmax scale.
WIDEN = """
import json, math, shutil, sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
source, target = map(Path, sys.argv[1:])
shutil.copytree(source, target, dirs_exist_ok=True)
config = json.loads((source / "config.json").read_text())
old, new = config["head_dim"], 2 * config["head_dim"]
pairs = torch.arange(old // 2) * 2
places = torch.cat([pairs, pairs + old])
weights = {name: weight.float() for name, weight in load_file(source / "model.safetensors").items()}
for name, weight in weights.items():
    if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
        heads = weight.reshape(-1, old, weight.shape[1])
        wide = torch.zeros(heads.shape[0], new, weight.shape[1])
        wide[:, places] = heads * (math.sqrt(2) if "q_proj" in name else 1)
        weights[name] = wide.reshape(-1, weight.shape[1])
    elif "o_proj" in name:
        heads = weight.reshape(weight.shape[0], -1, old)
        wide = torch.zeros(weight.shape[0], heads.shape[1], new)
        wide[:, :, places] = heads
        weights[name] = wide.reshape(weight.shape[0], -1)
save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
config |= {"head_dim": new, "dtype": "float32"}
(target / "config.json").write_text(json.dumps(config))
"""


def prepare() -> Path:
    """The interpreter of vLLM's venv; the model is there, too."""
    python = install()
    if not (MODEL / "config.json").exists():
        run([python, "-c", WIDEN, EXAMPLE, MODEL], "widening the model's heads")
    return python


@dataclass(frozen=True)
class Launch:
    """What a vLLM instance is started with.

    Args:
        python: of vLLM's environment.
        transfer: its ``--kv-transfer-config``.
        core: what its workers are bound to, in vLLM's words.
        log: takes what it prints.
        words: further arguments.
        environment: further variables.
        port: of its API.
    """

    python: Path
    transfer: Json | None
    core: str
    log: Path
    words: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=lambda: free_port())

    @property
    def url(self) -> str:
        """Of its API."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> subprocess.Popen[bytes]:
        """Start it, in a process group of its own."""
        command = [
            *(self.python.parent / "vllm", "serve", MODEL),
            *("--host", "127.0.0.1", "--port", self.port),
            *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", 2048, "--max-num-seqs", 8, *self.words),
        ]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # With a connector the default reserves both cores of a small machine.
            "VLLM_CPU_OMP_THREADS_BIND": self.core,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        variables = os.environ | settings | self.environment
        return start([str(word) for word in command], variables, self.log)


@contextmanager
def serving(
    python: Path, transfer: Json | None, core: str, log: Path, *words: str, **environment: str
) -> Iterator[str]:
    """One vLLM instance; its URL. Not necessarily up yet. Arguments as in ``Launch``."""
    log.unlink(missing_ok=True)  # of an earlier run
    launch = Launch(python, transfer, core, log, words, environment)
    child = launch.start()
    try:
        yield launch.url
    finally:
        stop(child)


@contextmanager
def proxying(prefill: str, decode: str, flow: str = "pull", *words: str) -> Iterator[str]:
    """The proxy in front of two instances that are up; its URL."""
    port = free_port()
    child = start_proxy(prefill, decode, port, flow, *words)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, PROXY_LOG, 60)
        yield url
    finally:
        stop(child)


def start_proxy(
    prefill: str, decode: str, port: int, flow: str, *words: str, emits_first_token: bool = True
) -> subprocess.Popen[bytes]:
    """The proxy, in a process group of its own."""
    pools = ["--prefill", prefill, "--decode", decode, "--flow", flow]
    pools += ["--decode-emits-first-token"] if emits_first_token else []
    command = [sys.executable, "-m", "mooncake_proxy", "--port", str(port), *pools, *words]
    return start(command, dict(os.environ), PROXY_LOG)


def start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A child in a process group of its own; the log goes on where it ended."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def stop(child: subprocess.Popen[bytes]) -> None:
    """End a child and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # all of them have ended
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(url: str, log: Path, timeout_s: float) -> None:
    """Skip with the log's last words if it never is."""
    print(f"-- waiting for {url}", flush=True)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(1)
    last = log.read_text("utf-8", "replace").splitlines()[-3:]
    raise Skip(f"{url} is not healthy after {timeout_s:g} s: {' | '.join(last)}")


def ask(url: str, path: str, body: Json) -> tuple[str, str]:
    """Text and finish reason."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            content = answer.read().decode()
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode('utf-8', 'replace')}", "error"
    if not body.get("stream"):
        return joined([json.loads(content)])
    *events, last = [block.removeprefix("data: ") for block in content.split("\n\n") if block]
    return joined([json.loads(event) for event in events]) if last == "[DONE]" else (last, "error")


def joined(chunks: list[Json]) -> tuple[str, str]:
    """One answer out of its pieces."""
    text, finish = "", ""
    for choice in (choice for chunk in chunks for choice in chunk.get("choices", ())):
        piece = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get(
            "content"
        )
        text += piece or ""
        finish = choice.get("finish_reason") or finish
    return text, finish


def figure(url: str, name: str) -> float:
    """A counter of a /metrics page, over all labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pattern = re.compile(rf"{re.escape(name)}(\{{.*\}})? ([0-9.e+]+)$")
    return sum(float(found[2]) for line in lines if (found := pattern.match(line)))
