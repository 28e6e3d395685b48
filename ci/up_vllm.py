"""P and D as vLLM instances (its CPU build) with our connector, and our proxy in front.

    make up ENGINE=vllm [ARGS="--flow push --port 8000"]

What ``mooncake-engine up`` does for our own engine: starts everything, prints a command to try and
what it answers, and serves until Ctrl-C. Logs go to .cache/vllm-*.log.

Exit 0: stopped; 1: a part did not come up or ended; 77: why vLLM can't be run here.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from test_vllm import cores, instance_log, transfer_config
from vllm_environment import SKIPPED, Skip, install_connector
from vllm_serving import (
    EXAMPLE,
    PROXY_LOG,
    Json,
    Launch,
    free_port,
    prepare,
    start_proxy,
    stop,
    wait_until_healthy,
)

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def main() -> int:
    """Start, introduce, wait."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--port", type=int, default=0, help="of the proxy; 0 takes a free one")
    parser.add_argument("--flow", default="pull", choices=("pull", "push"), help="who moves KV")
    parser.add_argument("--transport", action="append", help="for KV; repeat (default: shm, tcp)")
    parser.add_argument("--prefill-tp", type=int, default=1, help="tensor-parallel size of P")
    parser.add_argument("--decode-tp", type=int, default=1, help="tensor-parallel size of D")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds for vLLM")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        serve(args)
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    except KeyboardInterrupt:
        return 0
    return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def serve(args: argparse.Namespace) -> None:
    """Until a part ends, or the user ends it.

    Raises:
        Skip: vLLM can't be run here.
    """
    python = prepare()
    install_connector(python)
    with ExitStack() as stack:
        launches = [launch(python, name, args) for name in ROLES]
        parts = {}
        for name, each in zip(ROLES, launches, strict=True):
            parts[name] = each.start()
            stack.callback(stop, parts[name])
        for each in launches:
            wait_until_healthy(each.url, each.log, args.start_timeout)
        PROXY_LOG.unlink(missing_ok=True)
        port = args.port or free_port()
        parts["proxy"] = start_proxy(launches[0].url, launches[1].url, port, args.flow)
        stack.callback(stop, parts["proxy"])
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, PROXY_LOG, 60)
        introduce(url)
        while all(part.poll() is None for part in parts.values()):
            time.sleep(1)
        ended = [name for name, part in parts.items() if part.poll() is not None]
        print(f"{', '.join(ended)} has ended: see .cache/vllm-*.log", flush=True)


def launch(python: Path, name: str, args: argparse.Namespace) -> Launch:
    """How an instance is started."""
    role = ROLES[name]
    size = args.prefill_tp if name == "prefill" else args.decode_tp
    log = instance_log(role)
    log.unlink(missing_ok=True)
    return Launch(
        python,
        transfer_config(role, args.flow, args.transport or ["shm", "tcp"]),
        cores(0 if name == "prefill" else 1, size),
        log,
        ("--tensor-parallel-size", str(size)),
    )


def introduce(url: str) -> None:
    """Print a command to try, and what it answers."""
    question = next(iter(json.loads((EXAMPLE / "chat.json").read_text())["answers"]))
    body: Json = {"model": "tiny", "messages": [{"role": "user", "content": question}]}
    body |= {"max_tokens": 64, "temperature": 0}
    path = f"{url}/v1/chat/completions"
    streamed = shlex.quote(json.dumps(body | {"stream": True}))
    print(f"\ncurl -N {path} -H 'Content-Type: application/json' -d {streamed}\n")
    request = urllib.request.Request(
        path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        print(json.load(answer)["choices"][0]["message"]["content"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
