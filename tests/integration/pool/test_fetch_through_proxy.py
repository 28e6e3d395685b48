"""A proxy's conductor has a prefill instance fetch a prefix from the other instance's store.

The deployment: two prefill instances with a store each, a decode instance, and a proxy that
estimates costs.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.pd_processes import serving
from support.programs import TINY_LLAMA, running
from support.store_process import StoreProcess

PREFIX, TAIL, LONG_TAIL = 512, 40, 1100
"""Tokens of a conversation, of its continuation, and of a prompt that keeps an instance busy."""
ATTEMPTS = 8
"""How often the instance may be idle again before the proxy has placed the request."""
ANSWER = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SLOW = "llama-3-70b:A100:1"
"""The proxy overestimates compute time until it has measured it, so that it does not wait for a
busy instance."""


def prompt_of(seed: int, length: int) -> list[int]:
    """A prompt of tokens in the model's vocabulary."""
    return random.Random(seed).choices(range(3, 250), k=length)


def complete(url: str, prompt: Sequence[int], name: str = "alone") -> list[int]:
    """The tokens of an answer."""
    body: dict[str, Any] = {"prompt": list(prompt), **ANSWER}
    answer = httpx.post(
        f"{url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def counted(url: str, name: str, label: str = "") -> float:
    """The value of an instance's counter."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and label in line
    )


def wait_until_saved(*urls: str) -> None:
    deadline = time.monotonic() + 30
    while any(counted(url, "mooncake:kv_pool_saves_in_flight") for url in urls):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def explain(proxy: str, name: str) -> dict[str, Any] | None:
    """The placement of a request; None if it has not been placed yet."""
    answer = httpx.get(f"{proxy}/conductor/explain?request={name}")
    if answer.status_code == 404:
        return None
    found: dict[str, Any] = answer.raise_for_status().json()["prefill"]
    return found


def wait_until_placed(proxy: str, name: str) -> None:
    deadline = time.monotonic() + 30
    while explain(proxy, name) is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.timeout(300)
def test_prefix_is_fetched_from_store_named_by_conductor() -> None:
    pool = ("--kv-pool", "dram=64MiB,chunk=64,load=always,port=0")
    # A long continuation takes some seventy steps, so its instance is busy for a while.
    steps = ("--max-num-batched-tokens", "16", "--min-prefill-chunk", "16")
    with ExitStack() as stack:
        start = stack.enter_context
        prefills = [start(serving(TINY_LLAMA, "prefill", *pool, *steps)).url for _ in range(2)]
        decode = start(serving(TINY_LLAMA, "decode", *pool)).url
        single = start(serving(TINY_LLAMA, "both")).url
        argv = ["--port", "0", "--policy", "cost", "--costs", SLOW, "--decode", decode]
        argv += [part for url in prefills for part in ("--prefill", url)]
        proxy = start(running("mooncake_proxy", *argv)).wait_for("listens on").split()[-1]
        threads = start(ThreadPoolExecutor(1))

        def continue_twice(attempt: int) -> dict[str, Any]:
            """One conversation, then two continuations, the first a long one; returns the placement
            of the second, which arrives while the holder of the conversation computes the first."""
            first = prompt_of(10 * attempt, PREFIX)
            assert complete(proxy, first, f"first-{attempt}") == complete(single, first)
            wait_until_saved(*prefills)
            long = (*first, *prompt_of(10 * attempt + 1, LONG_TAIL))
            short = (*first, *prompt_of(10 * attempt + 2, TAIL))
            answer = threads.submit(complete, proxy, long, f"long-{attempt}")
            wait_until_placed(proxy, f"long-{attempt}")
            assert complete(proxy, short, f"short-{attempt}") == complete(single, short)
            assert answer.result() == complete(single, long)
            placed = explain(proxy, f"short-{attempt}")
            assert placed is not None
            return placed

        plans = []
        for attempt in range(ATTEMPTS):
            plans.append(continue_twice(attempt))
            hits = sum(
                counted(url, "mooncake:kv_pool_num_prefix_hints", 'kind="found"')
                for url in prefills
            )
            if hits:
                break
        assert hits, plans
        assert plans[-1]["plan"] == "fetch", plans
        loaded = sum(counted(url, "mooncake:kv_pool_num_loaded_chunks") for url in prefills)
        assert loaded >= PREFIX // 64
        assert not any(counted(url, "mooncake:kv_pool_num_failed_loads") for url in prefills)


@pytest.mark.timeout(300)
def test_conversation_returns_to_its_store_after_device_eviction() -> None:
    """Prefill instances evict blocks from their devices and publish it; the chunks in their stores
    are published as well, and known even to a proxy that starts later."""
    events = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": '
    pool = ("--kv-pool", "dram=64MiB,chunk=64,load=always", "--kv-events-config")
    with ExitStack() as stack:
        start = stack.enter_context
        prefills = [
            start(serving(TINY_LLAMA, "prefill", *pool, events + '"tcp://127.0.0.1:*"}')).url
            for _ in range(2)
        ]
        decode = start(serving(TINY_LLAMA, "decode")).url
        argv = ["--port", "0", "--policy", "cost", "--costs", SLOW, "--decode", decode]
        argv += [part for url in prefills for part in ("--prefill", url)]
        prompts = [prompt_of(seed, PREFIX) for seed in range(6)]
        for number, prompt in enumerate(prompts):  # each conversation has its own instance
            complete(prefills[number % 2], prompt)
        wait_until_saved(*prefills)
        for url in prefills:
            assert httpx.post(f"{url}/reset_prefix_cache").status_code == 200
        proxy = start(running("mooncake_proxy", *argv)).wait_for("listens on").split()[-1]
        while counted(proxy, "mooncake_proxy_instance_held_tokens", "host") < 6 * PREFIX:
            time.sleep(0.05)
        for number, prompt in enumerate(prompts):
            home = prefills[number % 2]
            loaded = counted(home, "mooncake:kv_pool_num_loaded_chunks")
            complete(proxy, (*prompt, *prompt_of(100 + number, TAIL)), f"turn-{number}")
            placed = explain(proxy, f"turn-{number}")
            assert placed is not None
            assert placed["instance"] == home, placed
            assert counted(home, "mooncake:kv_pool_num_loaded_chunks") == loaded + PREFIX // 64


@pytest.mark.timeout(300)
def test_stores_that_instances_connect_to_are_followed(tmp_path: Path) -> None:
    """Each instance saves to another store, and loads from both: so either holds all that both
    stores do. Their metrics are found as well."""
    address = "tcp://127.0.0.1:*"
    events = {"enable_kv_cache_events": True, "endpoint": address, "replay_endpoint": address}
    options = ("--dram=64M", "--kv-events-config", json.dumps(events), "--metrics-port=0")
    with ExitStack() as stack:
        start = stack.enter_context
        stores = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            stores.append(StoreProcess(tmp_path / name, *options))
            stack.callback(stores[-1].end, signal.SIGKILL)
        secret = ("--kv-secret-file", str(stores[0].secret_file))
        urls = []
        for used in (stores, stores[::-1]):
            connect = ",".join(f"connect=127.0.0.1:{store.port}" for store in used)
            pool = ("--kv-pool", f"{connect},chunk=64", *secret)
            urls.append(start(serving(TINY_LLAMA, "prefill", *pool)).url)
        for seed, url in enumerate(urls):
            complete(url, prompt_of(seed, PREFIX))
        wait_until_saved(*urls)
        decode = start(serving(TINY_LLAMA, "decode", *secret)).url
        argv = ["--port", "0", "--policy", "cost", "--costs", SLOW, "--decode", decode]
        argv += [part for url in urls for part in ("--prefill", url)]
        proxy = start(running("mooncake_proxy", *argv)).wait_for("listens on").split()[-1]
        complete(proxy, prompt_of(2, TAIL))  # the conductor looks at its instances
        while counted(proxy, "mooncake_proxy_instance_held_tokens", "host") < 4 * PREFIX:
            time.sleep(0.05)
        targets = httpx.get(f"{proxy}/metrics/targets").json()
        found = [each["targets"][0] for each in targets if each["labels"]["role"] == "store"]
        assert len(set(found)) == 2, targets
        for at in found:
            assert counted(f"http://{at}", "mooncake_store_puts_total") == PREFIX // 64
