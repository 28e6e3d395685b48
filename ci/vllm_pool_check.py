"""The pool's connector inside two real vLLM instances, one of which has the store."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import zmq
from vllm_environment import CACHE
from vllm_requests import figure, post, token_ids
from vllm_serving import Json, cores, free_port, serving, wait_until_healthy

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import EventStream
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import REPLAY_END, decode_batch, decode_sequence
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS
from mooncake_conductor.index.published_blocks import PublishedBlocks

CHUNK = 128
"""Tokens: vLLM's CPU pages have as many and are moved whole."""
LOADED = "vllm:mooncake_hal_pool_num_loaded_chunks_total"
SAVED = "vllm:mooncake_hal_pool_num_saved_chunks_total"
SAVES = "vllm:mooncake_hal_pool_num_saves_total"
SAVED_S = 60.0


def check_pool(
    python: Path,
    cases: dict[str, tuple[str, Json]],
    wanted: dict[str, Json],
    timeout_s: float,
) -> list[str]:
    """One instance computes and saves, the other one loads; returns what was wrong.

    Args:
        python: of vLLM's environment.
        cases: path and body by name, of prompts that share no prefix.
        wanted: what one vLLM says to each.
        timeout_s: for an instance to start.
    """
    port, problems = free_port(), []
    pools = (f"dram=256MiB,port={port},chunk={CHUNK}", f"connect=127.0.0.1:{port},chunk={CHUNK}")
    with ExitStack() as stack:
        urls = []
        replay_port = free_port()
        published = {
            "enable_kv_cache_events": True,
            "endpoint": f"tcp://127.0.0.1:{free_port()}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
        }
        for number, pool in enumerate(pools):
            log = CACHE / f"vllm-pool-{number}.log"
            words = ("--kv-events-config", json.dumps(published)) if number == 0 else ()
            urls.append(
                stack.enter_context(serving(python, pool_config(pool), cores(number), log, *words))
            )
            wait_until_healthy(urls[-1], log, timeout_s)  # the store comes first
        for number, (name, (path, body)) in enumerate(cases.items()):
            for url, what in zip(urls, ("computed", "loaded"), strict=True):
                found = token_ids(post(url, path, body))
                same = found == token_ids(wanted[name])
                print(
                    f"pool          {f'{name}, {what}':34} {'ok' if same else 'WRONG'}", flush=True
                )
                if not same:
                    problems.append(f"pool {name} {what}: {found!r:.200}")
                if what == "computed":  # it is saved behind its answer
                    until_saved(url, number + 1)
        saved, loaded = figure(urls[0], SAVED), figure(urls[1], LOADED)
        print(f"pool          {saved:g} chunks saved, {loaded:g} loaded", flush=True)
        # A prompt's last token is computed in any case: its logits are wanted.
        whole = sum((len(body["prompt"]) - 1) // CHUNK for _, body in cases.values())
        if saved < whole or loaded != whole:
            problems.append(f"pool: {saved:g} chunks were saved, {loaded:g} of {whole} loaded")
        problems += check_events(replay_port, cases)
        for url in urls:
            if failed := figure(url, "vllm:mooncake_hal_pool_hook_errors_total"):
                problems.append(f"pool: {failed:g} hooks of {url} have failed")
    return problems


def check_events(replay_port: int, cases: dict[str, tuple[str, Json]]) -> list[str]:
    """What vLLM has published of its own store, beside its blocks; returns what was wrong."""
    index = ChunkIndex(1)
    stream = EventStream(index, 0, PublishedBlocks())
    with zmq.Context() as context, context.socket(zmq.DEALER) as question:
        question.rcvtimeo, question.linger = 20_000, 0
        question.connect(f"tcp://127.0.0.1:{replay_port}")
        question.send_multipart((b"", (0).to_bytes(8, "big")))
        while (frames := question.recv_multipart())[-2] != REPLAY_END:
            stream.receive(decode_sequence(frames[-2]), decode_batch(frames[-1]))
    held = index.digest(0, Tier.HOST)[0]
    wanted = sum(
        (len(body["prompt"]) - 1) // CHUNK * CHUNK // CHUNK_TOKENS for _, body in cases.values()
    )
    print(f"pool          {held} of {wanted} chunks of prompts are in its KV events", flush=True)
    return [] if held >= wanted else [f"pool: KV events say {held} of {wanted} chunks"]


def until_saved(url: str, count: int, counter: str = SAVES) -> None:
    """Wait until an instance has stored so many prompts, or chunks, or it takes too long."""
    deadline = time.monotonic() + SAVED_S
    while figure(url, counter) < count and time.monotonic() < deadline:
        time.sleep(0.2)


def pool_config(pool: str) -> Json:
    """``--kv-transfer-config`` of an instance, or of a child of MultiConnector."""
    return {
        "kv_connector": "HalPoolConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": pool},
    }
