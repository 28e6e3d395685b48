"""Tests two vLLM prefill and two decode instances behind our proxy: cache-aware routing and
failover.

The proxy's conductor follows vLLM's own KV events: a prompt that one P computed without the proxy
is routed to that P. Then a P is killed while it computes, and the other one takes over. Then a D is
killed while it streams, and its streams continue on the other one, from the same token.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Barrier

from vllm_environment import CACHE, DidNotStart
from vllm_requests import ask, figure, post, until_zero, without_token_ids
from vllm_serving import (
    PROXY_LOG,
    Json,
    Launch,
    cores,
    free_port,
    start,
    stop,
    transfer_config,
    wait_until_healthy,
)

FLEET = CACHE / "vllm-fleet.json"
BLOCK = 128
"""Block size of vLLM on a CPU, in tokens."""
HITS = "vllm:prefix_cache_hits_total"
EVENTS_S = 3.0
"""Seconds in which the proxy processes published events."""
RUNNING, MIGRATED = "vllm:num_requests_running", "mooncake_proxy_migrated_total"
NUM_SALTS = 3
NUM_STREAMS, LONG_ANSWER = 4, 900
COSTS = "llama-3-8b:CPU:1"
"""The proxy's cost model for an instance on a CPU. With an A100's, a P that is not scheduled for
half a second counts as slower than one that computes 1,000 tokens, so that on a busy machine a
prompt was not routed to the P that had it cached."""
NOTHING_LEFT = ("vllm:kv_cache_usage_perc", "vllm:mooncake_hal_leases_held")


def check_fleet(
    python: Path,
    cases: dict[str, tuple[str, Json]],
    wanted: dict[str, Json],
    timeout_s: float,
) -> list[str]:
    """Test routing, then failover; returns the problems.

    Args:
        python: interpreter of vLLM's environment.
        cases: path and body of requests by name; their prompts share no prefix.
        wanted: a single vLLM's answer to each.
        timeout_s: seconds for an instance to start.
    """
    asked = {name: (path, without_token_ids(body)) for name, (path, body) in cases.items()}
    texts = {name: wanted[name]["choices"][0]["text"] for name in cases}
    try:
        with ExitStack() as stack:
            prefills = [Prefill(python, number) for number in range(2)]
            decodes = [
                Launch(
                    python,
                    transfer_config("kv_consumer", "pull", ["shm", "tcp"]),
                    cores(1),
                    CACHE / f"vllm-fleet-decode-{number}.log",
                )
                for number in range(2)
            ]
            launches = [*(each.launch for each in prefills), *decodes]
            children = [started(stack, launch) for launch in launches]
            for launch, child in zip(launches, children, strict=True):
                wait_until_healthy(launch.url, launch.log, timeout_s, [child])
            proxy = stack.enter_context(conducting(prefills, [each.url for each in decodes]))
            urls = [each.launch.url for each in prefills]
            problems = check_routing(proxy, urls, asked, texts)
            problems += kill_prefill(proxy, children[0], asked, texts)
            running = {each.url: child for each, child in zip(decodes, children[2:], strict=True)}
            problems += kill_decode(proxy, running, asked)
            for url in (urls[1], *running):
                problems += [
                    f"fleet: {url} has {each} {left:g}"
                    for each in NOTHING_LEFT
                    if (left := until_zero(url, each))
                ]
            return problems
    except DidNotStart as exc:
        return [f"fleet: {exc}"]


class Prefill:
    """A prefill instance that publishes KV events.

    Args:
        python: interpreter of vLLM's environment.
        number: index of the instance.
    """

    def __init__(self, python: Path, number: int) -> None:
        self.events, self.replay = free_port(), free_port()
        published = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
        }
        self.launch = Launch(
            python,
            transfer_config("kv_producer", "pull", ["shm", "tcp"]),
            cores(0),
            CACHE / f"vllm-fleet-prefill-{number}.log",
            ("--kv-events-config", json.dumps(published), "--max-num-batched-tokens", "256"),
        )

    @property
    def entry(self) -> Json:
        """Its entry in a pool file."""
        ports = {"kv_events_port": self.events, "kv_events_replay_port": self.replay}
        return {"url": self.launch.url} | ports


def started(stack: ExitStack, launch: Launch) -> subprocess.Popen[bytes]:
    """Start an instance, which the stack stops."""
    launch.log.unlink(missing_ok=True)
    child = launch.start()
    stack.callback(stop, child)
    return child


@contextmanager
def conducting(prefills: Sequence[Prefill], decodes: Sequence[str]) -> Iterator[str]:
    """Start the proxy with a conductor; yields its URL."""
    pools = {
        "prefill": [each.entry for each in prefills],
        "decode": [{"url": each, "emits_first_token": True} for each in decodes],
    }
    FLEET.write_text(json.dumps(pools))
    port = free_port()
    words = ["--pool-file", FLEET, "--policy", "cost", "--health-interval", "1", "--costs", COSTS]
    words += ["--migrate-streams"]
    command = [sys.executable, "-m", "mooncake_proxy", "--port", port, *words]
    child = start([str(word) for word in command], dict(os.environ), PROXY_LOG)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, PROXY_LOG, 60, [child])
        yield url
    finally:
        stop(child)


def check_routing(
    proxy: str, urls: list[str], asked: dict[str, tuple[str, Json]], texts: dict[str, str]
) -> list[str]:
    """Have each P compute half of the prompts, which the proxy only learns from events; then check
    that it routes accordingly."""
    holders = {name: number % len(urls) for number, name in enumerate(asked)}
    for name, (path, body) in asked.items():
        post(urls[holders[name]], path, body | {"max_tokens": 1})
    time.sleep(EVENTS_S)
    problems = []
    for name, (path, body) in asked.items():
        before = [figure(url, HITS) for url in urls]
        said, _ = ask(proxy, path, body)
        hits = [figure(url, HITS) - old for url, old in zip(urls, before, strict=True)]
        wanted = [0.0] * len(urls)
        wanted[holders[name]] = (len(body["prompt"]) - 1) // BLOCK * BLOCK
        problems += report(f"{name}, where it is cached", (said, hits), (texts[name], wanted))
    return problems


def kill_prefill(
    proxy: str,
    victim: subprocess.Popen[bytes],
    asked: dict[str, tuple[str, Json]],
    texts: dict[str, str],
) -> list[str]:
    """Kill all processes of a P while it computes prompts: clients must not notice."""
    salted = [
        (name, path, body | {"cache_salt": f"fleet {salt}", "stream": True})
        for salt in range(NUM_SALTS)
        for name, (path, body) in asked.items()
    ]
    with ThreadPoolExecutor(len(salted)) as threads:
        answers = [threads.submit(ask, proxy, path, body) for _, path, body in salted]
        time.sleep(0.1)
        os.killpg(victim.pid, signal.SIGKILL)
        said = [answer.result()[0] for answer in answers]
    wanted = [texts[name] for name, _, _ in salted]
    problems = report(f"{len(salted)} while a P is killed", said, wanted)
    name, path, body = salted[-1]
    body = body | {"cache_salt": "fleet after"}
    return problems + report("after that", ask(proxy, path, body)[0], texts[name])


def kill_decode(
    proxy: str, decodes: dict[str, subprocess.Popen[bytes]], asked: dict[str, tuple[str, Json]]
) -> list[str]:
    """Kill all processes of a D while it streams, and remove it from ``decodes``: clients must not
    notice."""
    more = {"max_tokens": LONG_ANSWER, "ignore_eos": True, "stream": True}
    bodies = [(path, body | more) for path, body in asked.values()][:NUM_STREAMS]
    with ThreadPoolExecutor(len(bodies)) as threads:
        wanted = list(threads.map(lambda each: ask(proxy, *each), bodies))
        begun = Barrier(len(bodies) + 1)
        answers = [threads.submit(ask, proxy, *each, begun.wait) for each in bodies]
        begun.wait(60)
        busiest = max(decodes, key=lambda url: figure(url, RUNNING))
        os.killpg(decodes.pop(busiest).pid, signal.SIGKILL)
        said = [answer.result() for answer in answers]
    problems = report(f"{len(bodies)} streams while a D is killed", said, wanted)
    return problems + report("streams continued on the other", figure(proxy, MIGRATED) > 0, True)


def report(what: str, found: object, wanted: object) -> list[str]:
    """Print whether a result is as expected; returns the problems."""
    same = found == wanted
    print(f"fleet         {what:34} {'ok' if same else 'WRONG'}", flush=True)
    if not same:
        print(f"{'':13} wanted {wanted!r:.200}\n{'':13} found  {found!r:.200}", flush=True)
    return [] if same else [f"fleet: {what}: {found!r:.200}, wanted {wanted!r:.200}"]
