"""A store in a process of its own publishes the chunks that engines save, with tokens and
tenants."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt, serve_all
from support.event_requests import request_events
from support.pool_engine import engine, settle
from support.portions import apply_all
from support.store_process import SECRET, StoreProcess

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import EventStream
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.kv_event_messages import (
    SNAPSHOT_REQUEST,
)
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS, chain_root, token_keys
from mooncake_conductor.index.published_blocks import PublishedBlocks
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.config import KVTransferConfig

GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)


def snapshot(endpoint: str, namespace: str) -> ChunkIndex:
    """The view of the store of a router that subscribes late."""
    index = ChunkIndex(1)
    stream = EventStream(index, 0, PublishedBlocks(), supports_snapshots=True, namespace=namespace)
    found = request_events(endpoint, SNAPSHOT_REQUEST)
    apply_all(stream.apply_snapshot(found[0][0], [batch for _, batch in found]))
    return index


@pytest.mark.timeout(300)
def test_saved_prompts_and_answers_are_published(tmp_path: Path) -> None:
    model = write_checkpoint(random_model("llama"), tmp_path / "llama")
    replay = f"ipc://{tmp_path}/replay"
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": replay,
    }
    config = ("--kv-events-config", json.dumps(events), "--metrics-port", "0")
    store = StoreProcess(tmp_path, "--dram", "32M", *config)
    try:
        pool = f"connect=127.0.0.1:{store.port},chunk={CHUNK_TOKENS},load=always"
        with engine(model, pool, network=KVTransferConfig(secret=SECRET)) as core:
            prompt = random_prompt(1, 3 * CHUNK_TOKENS + 10)
            request = EngineRequest("r", prompt, GREEDY, cache_salt="team-a")
            answer = serve_all(core, [request]).answers["r"]
            settle(core)
            [report] = core.report().stats.pool_stores
            assert report.metrics is not None
            with urllib.request.urlopen(f"http://{report.metrics}/metrics", timeout=60) as page:
                assert b"mooncake_store_puts_total" in page.read()
            endpoints = report.kv_events
            assert endpoints is not None
            assert endpoints.replay_endpoint == replay
            keys = token_keys((*prompt, *answer), chain_root("", "team-a"))[:4]
            deadline = time.monotonic() + 60
            while snapshot(replay, endpoints.namespace or "").num_held(0, Tier.HOST) < len(keys):
                assert time.monotonic() < deadline
            index = snapshot(replay, endpoints.namespace or "")
            assert index.match(keys, 0.0).local[0] == len(keys)
            assert not snapshot(replay, "another model's").num_held(0, Tier.HOST)
    finally:
        store.end(signal.SIGKILL)
