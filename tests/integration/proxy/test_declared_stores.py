"""Instances of other engines do not report which node stores they use: the proxy is told, and its
conductor follows the events of these stores."""

from __future__ import annotations

import asyncio
import json
import signal
from array import array
from contextlib import AsyncExitStack, closing
from pathlib import Path

import httpx
import pytest
import uvloop
from support.programs import running
from support.proxy_fakes import Behaviour, FakeInstance
from support.proxy_fakes_client import BODY
from support.store_process import CHUNK_BYTES, START_S, StoreProcess

from mooncake_kv.store.chunk_store import Chunk, ChunkContent, WriteHandle
from mooncake_kv.store.store_client import StoreClient

CHUNK_TOKENS, NUM_CHUNKS = 128, 16
LOOPBACK = "tcp://127.0.0.1:*"
EVENTS = {"enable_kv_cache_events": True, "endpoint": LOOPBACK, "replay_endpoint": LOOPBACK}
SLOW = "llama-3-70b:A100:1"


def save(client: StoreClient, name: str, namespace: bytes, ids: list[int]) -> None:
    """Save a prompt, as an instance does that computes it."""
    keys = [f"{name}-{number}".encode() for number in range(NUM_CHUNKS)]
    chunks = [
        Chunk(
            key,
            keys[number - 1] if number else None,
            number,
            CHUNK_BYTES,
            CHUNK_TOKENS,
            content=ChunkContent(
                namespace, array("I", ids[number * CHUNK_TOKENS :][:CHUNK_TOKENS]).tobytes()
            ),
        )
        for number, key in enumerate(keys)
    ]
    granted = client.reserve(chunks).result(60)
    handles = [each for each in granted if isinstance(each, WriteHandle)]
    assert client.commit(handles).result(60) == [True] * NUM_CHUNKS


async def held_in_stores(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Tokens in host memory by instance, as far as the conductor knows."""
    lines = (await http.get("/metrics")).text.splitlines()
    return {
        url: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("mooncake_proxy_instance_held_tokens") and '"host"' in line
        for url in [line.partition('instance="')[2].partition('"')[0]]
    }


@pytest.mark.timeout(300)
def test_an_instance_is_scored_by_the_declared_store(tmp_path: Path) -> None:
    """Two instances share a store, by `--store-kv-events`; a third, in a pool file, has none. Of
    what the store holds, another model's KV does not count."""
    ids = list(range(1000, 1000 + NUM_CHUNKS * CHUNK_TOKENS))
    others = [number + 20_000 for number in ids]
    store = StoreProcess(tmp_path, "--dram=64M", "--kv-events-config", json.dumps(EVENTS))

    async def main(events: str) -> None:
        async with AsyncExitStack() as stack:
            fakes = [FakeInstance(name, Behaviour(refuses=None)) for name in "abcd"]
            for fake in fakes:
                await fake.start()
                stack.push_async_callback(fake.kill)
            users, [alone, decode] = fakes[:2], fakes[2:]
            pool_file = tmp_path / "pool.json"
            pool_file.write_text(json.dumps({"prefill": [alone.url], "decode": [decode.url]}))
            argv = ["--port", "0", "--policy", "cost", "--costs", SLOW]
            argv += ["--pool-file", str(pool_file), "--store-kv-events", events]
            argv += [part for fake in users for part in ("--prefill", fake.url)]
            program = stack.enter_context(running("mooncake_proxy", *argv))
            url = (await asyncio.to_thread(program.wait_for, "listens on")).split()[-1]
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))

            wanted = {fake.url: float(len(ids)) for fake in users}
            everywhere = wanted | {alone.url: 0.0, decode.url: 0.0}
            for _ in range(600):
                if (held := await held_in_stores(http, url)) == everywhere:
                    break
                await asyncio.sleep(0.05)
            assert held == everywhere
            # Only the first answer: what fake instances take teaches the conductor that to compute
            # costs nothing.
            answer = await http.post("/v1/completions", json=BODY | {"prompt": [*ids, 7]})
            assert answer.status_code == 200, answer.text
            request = answer.headers["x-request-id"]
            explained = await http.get(f"/conductor/explain?request={request}")
            placed = explained.raise_for_status().json()["prefill"]
            assert placed["instance"] in wanted
            assert placed["num_reused"] == len(ids)

    with closing(StoreClient(store.address, "rank")) as client:
        try:
            assert client.await_store(START_S)
            save(client, "ours", b"m", ids)
            save(client, "others", b"n", others)
            assert client.arena is not None
            published = client.arena.kv_events
            assert published is not None
            addresses = f"{published.endpoint},{published.replay_endpoint}"
            uvloop.run(main(f"{addresses},{b'm'.hex()}"))
        finally:
            store.end(signal.SIGKILL)
