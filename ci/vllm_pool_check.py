"""Tests the pool's connector in two vLLM instances, one of which runs the store, with an SSD: with
full attention, and with layers that have sliding windows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import zmq
from vllm_environment import CACHE
from vllm_pairs import FULL, MODELS, SLIDING, answers_alone, folder_of
from vllm_requests import figure, post, token_ids
from vllm_serving import Json, cores, free_port, serving

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import EventStream
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import REPLAY_END, decode_batch, decode_sequence
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS
from mooncake_conductor.index.published_blocks import PublishedBlocks

CHUNK = 128
"""Tokens per chunk: the size of vLLM's CPU pages, which are moved whole."""
LOADED = "vllm:mooncake_hal_pool_num_loaded_chunks_total"
SAVED = "vllm:mooncake_hal_pool_num_saved_chunks_total"
SAVES = "vllm:mooncake_hal_pool_num_saves_total"
HOOK_ERRORS = "vllm:mooncake_hal_pool_hook_errors_total"
SAVED_S = 60.0
SSD = CACHE / "vllm-pool-ssd"


def check_pool(
    python: Path,
    cases: dict[str, tuple[str, Json]],
    wanted: dict[str, Json],
    timeout_s: float,
) -> list[str]:
    """Test that one instance saves KV and the other one loads it, and that the first one finds it
    on its SSD after a restart; the former also with sliding windows. Returns the problems.

    Args:
        python: interpreter of vLLM's environment.
        cases: path and body of requests by name; their prompts share no prefix.
        wanted: a single vLLM's answer to each.
        timeout_s: seconds for an instance to start.
    """
    answers = PoolAnswers(cases, wanted)
    problems = check_shared(python, answers, timeout_s) + check_again(python, answers, timeout_s)
    wanted = answers_alone(python, timeout_s, cases, SLIDING)
    return problems + check_shared(python, PoolAnswers(cases, wanted, SLIDING), timeout_s)


@dataclass(frozen=True)
class PoolAnswers:
    """Requests, and a single vLLM's answers to them; see ``check_pool``. The model is one of
    ``MODELS``."""

    cases: dict[str, tuple[str, Json]]
    wanted: dict[str, Json]
    model: str = FULL

    @property
    def num_chunks(self) -> int:
        """Number of chunks that the prompts fill, without their last tokens, which are always
        computed for their logits."""
        return sum((len(body["prompt"]) - 1) // CHUNK for _, body in self.cases.values())

    def check(self, url: str, name: str, how: str) -> list[str]:
        """Send one of the requests to an instance; returns the problems."""
        found = token_ids(post(url, *self.cases[name]))
        same = found == token_ids(self.wanted[name])
        print(f"pool {self.model:8} {f'{name}, {how}':34} {'ok' if same else 'WRONG'}", flush=True)
        return [] if same else [f"pool, {self.model}: {name} {how}: {found!r:.200}"]


def check_shared(python: Path, answers: PoolAnswers, timeout_s: float) -> list[str]:
    """Test two instances, with the store in the first one; returns the problems."""
    shutil.rmtree(SSD, ignore_errors=True)
    SSD.mkdir()
    model, options = folder_of(python, answers.model), MODELS[answers.model].words
    port, replay_port, problems = free_port(), free_port(), []
    published = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
    }
    with ExitStack() as stack:
        urls = []
        for number, pool in enumerate((own_pool(port), f"connect=127.0.0.1:{port},chunk={CHUNK}")):
            log = CACHE / f"vllm-pool-{number}.log"
            words = ("--kv-events-config", json.dumps(published)) if number == 0 else ()
            vllm = stack.enter_context(
                serving(
                    python, pool_config(pool), cores(number), log, *options, *words, model=model
                )
            )
            vllm.wait_until_healthy(timeout_s)  # the store must be ready before its clients
            urls.append(vllm.url)
        for number, name in enumerate(answers.cases):
            problems += answers.check(urls[0], name, "computed")
            until_saved(urls[0], number + 1)  # saving ends after the answer
            problems += answers.check(urls[1], name, "loaded")
        saved, loaded = figure(urls[0], SAVED), figure(urls[1], LOADED)
        print(f"pool          {saved:g} chunks saved, {loaded:g} loaded", flush=True)
        whole = answers.num_chunks
        if saved < whole or loaded != whole:
            problems.append(f"pool: {saved:g} chunks were saved, {loaded:g} of {whole} loaded")
        problems += check_events(replay_port, answers.cases)
        problems += [each for url in urls for each in hook_errors(url)]
        on_ssd = until_on_ssd(port, whole)
        print(f"pool          {on_ssd} of {whole} chunks of prompts are on its SSD", flush=True)
        if on_ssd < whole:
            problems.append(f"pool: {on_ssd} of {whole} chunks were used twice and are on the SSD")
    return problems


def check_again(python: Path, answers: PoolAnswers, timeout_s: float) -> list[str]:
    """Restart the first instance, whose memory is then empty; returns the problems."""
    log = CACHE / "vllm-pool-again.log"
    with serving(python, pool_config(own_pool(free_port())), cores(0), log) as vllm:
        vllm.wait_until_healthy(timeout_s)
        url = vllm.url
        problems = [
            each for name in answers.cases for each in answers.check(url, name, "from its SSD")
        ]
        loaded = figure(url, LOADED)
        print(f"pool          {loaded:g} chunks loaded after a restart", flush=True)
        if loaded != answers.num_chunks:
            problems.append(f"pool: {loaded:g} of {answers.num_chunks} chunks came from the SSD")
        return problems + hook_errors(url)


def own_pool(port: int) -> str:
    """Pool option of the instance with the store."""
    return f"dram=256MiB,ssd={SSD}:1GiB,port={port},chunk={CHUNK}"


def hook_errors(url: str) -> list[str]:
    """Problems: failed hooks of an instance."""
    failed = figure(url, HOOK_ERRORS)
    return [f"pool: {failed:g} hooks of {url} have failed"] if failed else []


def until_on_ssd(port: int, count: int) -> int:
    """Wait until a store's SSD holds this many chunks, or a timeout; returns the number it
    holds."""
    command = [sys.executable, "-m", "mooncake_kv", "stats", "--json", "--port", str(port)]
    deadline = time.monotonic() + SAVED_S
    while True:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        found = int(json.loads(answer.stdout)["ssd_chunks"])
        if found >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def check_events(replay_port: int, cases: dict[str, tuple[str, Json]]) -> list[str]:
    """Check the KV events that vLLM published for its store, besides its blocks; returns the
    problems."""
    index = ChunkIndex(1)
    stream = EventStream(index, 0, PublishedBlocks())
    with zmq.Context() as context, context.socket(zmq.DEALER) as question:
        question.rcvtimeo, question.linger = 20_000, 0
        question.connect(f"tcp://127.0.0.1:{replay_port}")
        question.send_multipart((b"", (0).to_bytes(8, "big")))
        while (frames := question.recv_multipart())[-2] != REPLAY_END:
            stream.receive(decode_sequence(frames[-2]), decode_batch(frames[-1]))
    held = index.num_held(0, Tier.HOST)
    wanted = sum(
        (len(body["prompt"]) - 1) // CHUNK * CHUNK // CHUNK_TOKENS for _, body in cases.values()
    )
    print(f"pool          {held} of {wanted} chunks of prompts are in its KV events", flush=True)
    return [] if held >= wanted else [f"pool: KV events say {held} of {wanted} chunks"]


def until_saved(url: str, count: int, counter: str = SAVES) -> None:
    """Wait until an instance has stored this many prompts (or chunks), or a timeout."""
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
