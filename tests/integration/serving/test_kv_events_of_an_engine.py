"""An engine publishes the contents of its prefix cache, and a conductor's index agrees with it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from support.event_requests import FROM_THE_START, request_events

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import EventStream
from mooncake_conductor.index.holder_sets import Tier
from mooncake_engine import LLM, SamplingParams
from mooncake_engine.errors import ConfigError
from mooncake_kv.kv_events import event_key
from mooncake_kv.kv_events_config import KVEventsConfig

MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny-llama"


def replay(endpoint: str, stream: EventStream) -> None:
    """All events that the engine has published so far."""
    for sequence, batch in request_events(endpoint, FROM_THE_START):
        stream.receive(sequence, batch)


def test_index_matches_prefix_cache(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(True, endpoint=f"ipc://{tmp_path}/events", replay_endpoint=endpoint)
    index = ChunkIndex(1)
    stream = EventStream(index, 0)
    with LLM(MODEL, threads=1, num_kv_blocks=24, block_size=16, kv_events=config) as llm:
        few = SamplingParams(max_tokens=4, temperature=0.0)
        for number in range(8):  # 40 tokens or more each, so that blocks are evicted
            llm.generate([[1, number + 5, *range(10, 60 + number)]], few)
        pool = llm._engine._core._scheduler.blocks.pool
        wanted = {event_key(digest) for digest in pool._index}
        count = len(wanted)
        while index.num_held(0, Tier.DEVICE) != count or not all(map(index.num_copies, wanted)):
            replay(endpoint, stream)  # the publisher's thread sends batches asynchronously
        assert llm.reset_prefix_cache()
        llm.generate([[3, *range(30)]], few)
        assert 0 < len(pool._index) < count
        while index.num_held(0, Tier.DEVICE) != len(pool._index):
            replay(endpoint, stream)


def test_address_in_use_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        events = KVEventsConfig(True, endpoint=f"tcp://*:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"KV events can't be published at .*in use"):
            LLM(MODEL, threads=1, num_kv_blocks=24, kv_events=events)
