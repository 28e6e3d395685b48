"""Serves a model with P and D on vLLM's CPU build with our connector, behind our proxy.

    make up ENGINE=vllm [MODEL=DIR] [ARGS="--flow push --port 8000 --vllm-args='--dtype bfloat16'"]

Does what ``mooncake-engine up`` does for our own engine: starts everything, prints a command to try
and its answer, and serves until Ctrl-C. Logs go to .cache/vllm-*.log. The example model is
converted to wider heads first, as vLLM's CPU attention does not support a head size of 16.

Exits 0 after Ctrl-C, 1 if a process did not start or ended, 77 with the reason if vLLM can't run
here.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from vllm_environment import CACHE, SKIPPED, DidNotStart, Skip, install_connector
from vllm_requests import ANSWER_TIMEOUT_S
from vllm_serving import (
    EXAMPLE,
    PROXY_LOG,
    Json,
    Launch,
    cores,
    prepare,
    start_proxy,
    stop,
    transfer_config,
    wait_until_healthy,
)

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
PROMPT, MAX_TOKENS = "What is prefill?", 64


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=EXAMPLE, help="model directory")
    parser.add_argument("--port", type=int, default=8000, help="the proxy's port; 0: any free one")
    parser.add_argument("--flow", default="pull", choices=("pull", "push"), help="who moves KV")
    parser.add_argument(
        "--transport", action="append", help="of KV; repeatable (default: shm, tcp)"
    )
    parser.add_argument("--prefill-tp", type=int, default=1, help="tensor-parallel size of P")
    parser.add_argument("--decode-tp", type=int, default=1, help="tensor-parallel size of D")
    parser.add_argument("--vllm-args", default="", help="options of vllm serve for P and D")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds for vLLM")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        return serve(args, proxy_port(args.port))
    except KeyboardInterrupt:
        return 0
    except (DidNotStart, OSError) as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop everything at the first signal; ignore later ones, which would interrupt the
    shutdown."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def proxy_port(wanted: int) -> int:
    """That port, or a free one for 0; checked before the models are loaded.

    Raises:
        OSError: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as exc:
            raise OSError(f"port {wanted} is not available ({exc}); use --port, 0 for any") from exc
        return int(probe.getsockname()[1])


def serve(args: argparse.Namespace, port: int) -> int:
    """Serve until a process ends, or the user stops it; returns the exit status.

    Raises:
        DidNotStart: a process does not start.
        Skip: vLLM can't run here.
    """
    python = prepare()
    install_connector(python)
    with ExitStack() as stack:
        launches = {name: launch(python, name, args) for name in ROLES}
        parts = {}
        for name, each in launches.items():
            parts[name] = each.start()
            stack.callback(stop, parts[name])
        for each in launches.values():
            wait_until_healthy(each.url, each.log, args.start_timeout, list(parts.values()))
        PROXY_LOG.unlink(missing_ok=True)
        urls = [each.url for each in launches.values()]
        parts["proxy"] = start_proxy(urls[0], urls[1], port, args.flow)
        stack.callback(stop, parts["proxy"])
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, PROXY_LOG, 60, [parts["proxy"]])
        introduce(url)
        print(f"{', '.join(ended(parts))} has ended: see {CACHE}/vllm-*.log", flush=True)
    return 1


def launch(python: Path, name: str, args: argparse.Namespace) -> Launch:
    """The parameters with which an instance is started."""
    role = ROLES[name]
    size = args.prefill_tp if name == "prefill" else args.decode_tp
    log = CACHE / f"vllm-up-{name}.log"
    log.unlink(missing_ok=True)
    is_example = args.model.resolve() == EXAMPLE.resolve()
    served_as = ("--served-model-name", args.model.resolve().name)
    return Launch(
        python,
        transfer_config(role, args.flow, args.transport or ["shm", "tcp"]),
        cores(0 if name == "prefill" else 1, size),
        log,
        (*served_as, "--tensor-parallel-size", str(size), *shlex.split(args.vllm_args)),
        model=None if is_example else args.model,
    )


def introduce(url: str) -> None:
    """Print a command to try, and its answer."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    body: Json = {"model": model, "messages": [{"role": "user", "content": PROMPT}]}
    body |= {"max_tokens": MAX_TOKENS, "temperature": 0}
    path = f"{url}/v1/chat/completions"
    streamed = shlex.quote(json.dumps(body | {"stream": True}))
    print(f"\ncurl -N {path} -H 'Content-Type: application/json' -d {streamed}\n")
    request = urllib.request.Request(
        path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        print(json.load(answer)["choices"][0]["message"]["content"], flush=True)


def ended(parts: dict[str, subprocess.Popen[bytes]]) -> list[str]:
    """Wait until a process ends; returns the names of those that have."""
    while not (found := [name for name, part in parts.items() if part.poll() is not None]):
        time.sleep(1)
    return found


if __name__ == "__main__":
    sys.exit(main())
