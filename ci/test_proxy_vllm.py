"""The proxy in front of a real vLLM (its CPU build): a prefill and a decode instance with NIXL.

    python ci/test_proxy_vllm.py [--start-timeout 420]

Installs vLLM into a venv of its own under .cache/ the first time (about 3.7 GB), serves
examples/tiny-llama twice, and compares what the proxy answers with what one instance answers by
itself, whole and streamed. Prints every comparison. Exit 0: all the same and all KV came over;
1: something differed; 77: "skipped: ..." and why vLLM can't be run here.
"""

from __future__ import annotations

import argparse
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vllm_environment import CACHE, SKIPPED, Skip, install, run

ROOT = Path(__file__).resolve().parent.parent
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


def main() -> int:
    """Install, serve, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--start-timeout", type=float, default=420.0, help="seconds for vLLM")
    args = parser.parse_args()
    try:
        python = prepare()
        with ExitStack() as stack:
            return compare(*start_all(stack, python, args.start_timeout))
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED


# ---------------------------------------------------------------- what runs


def prepare() -> Path:
    """The interpreter of vLLM's venv; the model is there, too."""
    python = install()
    if not (MODEL / "config.json").exists():
        run([python, "-c", WIDEN, EXAMPLE, MODEL], "widening the model's heads")
    return python


def start_all(stack: ExitStack, python: Path, timeout_s: float) -> tuple[str, str, str]:
    """URLs of proxy, P and D."""
    logs = [CACHE / f"vllm-{role}.log" for role in ("prefill", "decode")]
    urls = [
        stack.enter_context(serving(python, "kv_producer", 0, logs[0])),
        stack.enter_context(serving(python, "kv_consumer", 1, logs[1])),
    ]
    for url, log in zip(urls, logs, strict=True):
        wait_until_healthy(url, log, timeout_s)
    port = free_port()
    pools = ["--prefill", urls[0], "--decode", urls[1], "--decode-emits-first-token"]
    command = [sys.executable, "-m", "mooncake_proxy", "--port", str(port), *pools]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "proxy")}
    stack.enter_context(process(command, environment, CACHE / "vllm-proxy.log"))
    proxy = f"http://127.0.0.1:{port}"
    wait_until_healthy(proxy, CACHE / "vllm-proxy.log", 30)
    return proxy, urls[0], urls[1]


@contextmanager
def serving(python: Path, kv_role: str, core: int, log: Path) -> Iterator[str]:
    """One vLLM instance; its URL. Not necessarily up yet."""
    port = free_port()
    transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "engine_id": kv_role}
    command = [
        *(python.parent / "vllm", "serve", MODEL, "--host", "127.0.0.1", "--port", port),
        *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", 2048, "--max-num-seqs", 8),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # With a connector the default reserves both cores of a small machine.
        "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NO_USAGE_STATS": "1",
        "UCX_TLS": "tcp,self,sm",
        "HF_HUB_OFFLINE": "1",
    }
    with process([str(word) for word in command], environment, log):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A child and its children, which end with the block."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


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


# ---------------------------------------------------------------- comparing


def cases() -> dict[str, tuple[str, Json]]:
    """Path and body of what is asked, greedily: both sides have to say the same."""
    page = (EXAMPLE / "page.txt").read_text("utf-8")
    question = next(iter(json.loads((EXAMPLE / "chat.json").read_text())["answers"]))
    base: Json = {"model": "tiny", "temperature": 0, "max_tokens": 24}
    chat = base | {"messages": [{"role": "user", "content": question}]}
    completion, chatting = "/v1/completions", "/v1/chat/completions"
    return {
        "short prompt": (completion, base | {"prompt": page[:40]}),
        "several blocks": (completion, base | {"prompt": page[:300]}),
        "long prompt": (completion, base | {"prompt": page[300:1300]}),
        "token ids": (completion, base | {"prompt": list(page[100:400].encode())}),
        "one token": (completion, base | {"prompt": page[:200], "max_tokens": 1}),
        "logprobs": (completion, base | {"prompt": page[40:240], "logprobs": 2}),
        "chat": (chatting, chat),
    }


def compare(proxy: str, prefill: str, decode: str) -> int:
    """Ask one instance alone, then the proxy, whole and streamed."""
    num_wrong = 0
    alone = {name: ask(prefill, *case) for name, case in cases().items()}
    for name, (path, body) in cases().items():
        for is_streamed in (False, True):
            seen = ask(proxy, path, body | ({"stream": True} if is_streamed else {}))
            same = seen == alone[name]
            num_wrong += not same
            how = "streamed" if is_streamed else "whole"
            print(f"{name:16} {how:9} {'same' if same else 'DIFFERS'} {seen!r:.100}")
            if not same:
                print(f"{'':16} wanted    {alone[name]!r:.100}")
    num_pulled = figure(decode, "vllm:external_prefix_cache_hits_total")
    fallbacks = figure(proxy, "mooncake_proxy_local_prefill_total")
    print(f"prompt tokens whose KV came from P: {num_pulled:g}; fallbacks: {fallbacks:g}")
    return 1 if num_wrong or not num_pulled or fallbacks else 0


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


if __name__ == "__main__":
    sys.exit(main())
