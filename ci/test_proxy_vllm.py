"""Tests the proxy in front of vLLM's CPU build: a prefill and a decode instance with NIXL.

    python ci/test_proxy_vllm.py [--start-timeout 420]

Installs vLLM into a separate venv under .cache/ the first time (about 3.7 GB), serves
examples/tiny-llama twice, and compares the proxy's answers with those of a single instance, without
and with streaming. Prints every comparison. Exits 0 if all answers are equal and all KV was
transferred, 1 if not, 77 with "skipped: ..." and the reason if vLLM can't run here.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from vllm_environment import CACHE, SKIPPED, Skip, exit_on_sigterm
from vllm_requests import ask, figure
from vllm_serving import (
    EXAMPLE,
    Json,
    RunningVllm,
    cores,
    nixl_variables,
    prepare,
    proxying,
    serving,
)


def main() -> int:
    """Install vLLM, serve, and compare answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--start-timeout", type=float, default=420.0, help="seconds for vLLM")
    args = parser.parse_args()
    exit_on_sigterm()
    try:
        python = prepare()
        with ExitStack() as stack:
            return compare(*start_all(stack, python, args.start_timeout))
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED


# ---------------------------------------------------------------- processes


def start_all(stack: ExitStack, python: Path, timeout_s: float) -> tuple[str, str, str]:
    """Start everything; returns the URLs of proxy, P and D."""
    logs = [CACHE / f"vllm-{role}.log" for role in ("prefill", "decode")]
    pair = [
        stack.enter_context(nixl_instance(python, role, core, log))
        for role, core, log in zip(("kv_producer", "kv_consumer"), (0, 1), logs, strict=True)
    ]
    for vllm in pair:
        vllm.wait_until_healthy(timeout_s)
    prefill, decode = (vllm.url for vllm in pair)
    return stack.enter_context(proxying(prefill, decode)), prefill, decode


def nixl_instance(
    python: Path, kv_role: str, core: int, log: Path
) -> AbstractContextManager[RunningVllm]:
    """Start one vLLM instance with vLLM's own NIXL connector."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role, "engine_id": kv_role}
    return serving(
        python,
        transfer,
        cores(core),
        log,
        **nixl_variables(),
    )


# ---------------------------------------------------------------- comparing


def cases() -> dict[str, tuple[str, Json]]:
    """Paths and bodies of greedy requests, by name: both sides must give the same answer."""
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
    """Query one instance alone, then the proxy, without and with streaming; returns the status."""
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


if __name__ == "__main__":
    sys.exit(main())
