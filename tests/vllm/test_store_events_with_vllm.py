"""A live store's KV events are decoded by vLLM's own classes.

The subscriber works as vLLM's example does: two sockets, sequence numbers, and a replay request for
missed batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from mooncake_kv.kv_event_publisher import SNAPSHOT_REQUEST
from mooncake_kv.kv_events import event_key
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.store.chunk_keys import KVIdentity, chunk_keys
from mooncake_kv.store.chunk_store import Chunk, ChunkContent, WriteHandle
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig, StoreUser
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig

IDENTITY = KVIdentity("llama", "float32", chunk_tokens=64)
CHUNK_BYTES = 1 << 16
TOPIC = "kv-events"
WAIT_S = 60.0
Event = BlockStored | BlockRemoved | AllBlocksCleared


def chunks_of(ids: list[int], salt: str = "") -> list[Chunk]:
    """The chunks of a prompt, as a pool client puts them."""
    keys = chunk_keys(IDENTITY, ids, tenant_salt=salt)
    tokens, size = np.asarray(ids, "<u4"), IDENTITY.chunk_tokens
    contents = [
        ChunkContent(IDENTITY.root(), tokens[at * size : (at + 1) * size].tobytes())
        for at in range(len(keys))
    ]
    return [
        Chunk(key, keys[at - 1] if at else None, at, CHUNK_BYTES, size, salt, contents[at])
        for at, key in enumerate(keys)
    ]


def hashes_of(chunks: list[Chunk]) -> list[int]:
    return [event_key(chunk.key) for chunk in chunks]


class Subscriber:
    """Subscribes as vLLM's ``examples/features/kv_events/kv_events_subscriber.py``.

    It requests replays over a DEALER socket, as vLLM's tests do: a REQ socket would receive only
    one message of a response.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self.received: dict[int, bytes] = {}
        self.events: list[Event] = []
        self._context = zmq.Context()
        self._replay_endpoint = replay_endpoint
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(endpoint)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)

    def receive(self, timeout_ms: int) -> bool:
        """Process one batch; False if none arrives within the timeout."""
        if not self._sub.poll(timeout_ms):
            return False
        topic, number, payload = self._sub.recv_multipart()
        assert topic.decode() == TOPIC
        sequence = int.from_bytes(number, "big")
        assert not self.received or sequence == max(self.received) + 1, "a batch is missing"
        self.received[sequence] = payload
        self.events += self.decoder.decode(payload).events
        return True

    def until(self, is_there: Callable[[], bool]) -> None:
        """Process batches until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not is_there():
            self.receive(200)
            assert time.monotonic() < deadline, self.events

    def ask(self, question: bytes) -> list[tuple[int, bytes]]:
        """Request a replay; returns sequence numbers and batches of the response."""
        found = []
        with self._context.socket(zmq.DEALER) as replay:
            replay.rcvtimeo, replay.linger = int(WAIT_S * 1000), 0
            replay.connect(self._replay_endpoint)
            replay.send_multipart((b"", question))
            while True:
                _, topic, number, payload = replay.recv_multipart()
                if not payload:
                    return found
                assert topic.decode() == TOPIC
                found.append((int.from_bytes(number, "big"), payload))

    def stored(self, medium: str) -> list[int]:
        """All blocks that were published as stored in this medium."""
        events = [e for e in self.events if isinstance(e, BlockStored) and e.medium == medium]
        return [block for event in events for block in event.block_hashes]

    def removed(self, medium: str) -> list[int]:
        """All blocks that were published as removed from this medium."""
        events = [e for e in self.events if isinstance(e, BlockRemoved) and e.medium == medium]
        return [block for event in events for block in event.block_hashes]

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NodeStore]:
    (tmp_path / "ssd").mkdir()
    directory = SsdDirectoryConfig(tmp_path / "ssd", 64 << 20, 16 << 20, min_free_bytes=0)
    events = KVEventsConfig(
        True, None, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", topic=TOPIC
    )
    config = NodeStoreConfig(64 * CHUNK_BYTES, ssd=SsdConfig((directory,)), kv_events=events)
    opened = NodeStore(config)
    yield opened
    opened.close()


@pytest.fixture
def user(store: NodeStore) -> Iterator[StoreUser]:
    opened = store.open_user()
    yield opened
    opened.close()


@pytest.fixture
def subscriber(store: NodeStore, user: StoreUser) -> Iterator[Subscriber]:
    """A subscriber to batches from now on; the first batches had no subscriber."""
    endpoints = store.arena.kv_events
    assert endpoints is not None
    assert endpoints.replay_endpoint is not None
    opened = Subscriber(endpoints.endpoint, endpoints.replay_endpoint)
    first = 1000
    while not opened.receive(200):
        put(user, chunks_of([first] * 64))
        first += 1
    yield opened
    opened.close()


def put(user: StoreUser, chunks: list[Chunk]) -> None:
    granted = user.reserve(chunks).result()
    handles = [grant for grant in granted if isinstance(grant, WriteHandle)]
    assert user.commit(handles).result() == [True] * len(chunks)


def test_vllm_decodes_events_of_store(user: StoreUser, subscriber: Subscriber) -> None:
    ids = list(range(192))
    chunks = chunks_of(ids, salt="team-a")
    hashes = hashes_of(chunks)
    put(user, chunks)
    subscriber.until(lambda: hashes[-1] in subscriber.stored(MEDIUM_CPU))
    event = subscriber.events[-1]
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash) == (hashes, None)
    assert (event.token_ids, event.block_size) == (ids, 64)
    assert event.extra_keys == [("team-a",), None, None]
    assert (event.lora_id, event.lora_name) == (None, None)
    [raw] = msgspec.msgpack.decode(subscriber.received[max(subscriber.received)])[1]
    assert raw["namespace"] == IDENTITY.root().hex()  # a field that vLLM does not use

    user.touch([chunk.key for chunk in chunks]).result()  # the second use copies them to SSDs
    subscriber.until(lambda: set(subscriber.stored(MEDIUM_STORAGE)) == set(hashes))
    assert not subscriber.removed(MEDIUM_CPU)

    more = chunks_of([*ids, *range(64)], salt="team-a")
    put(user, more[3:])
    subscriber.until(lambda: hashes_of(more)[-1] in subscriber.stored(MEDIUM_CPU))
    follower = subscriber.events[-1]
    assert isinstance(follower, BlockStored)
    assert (follower.parent_block_hash, follower.extra_keys) == (hashes[-1], None)

    user.drop([chunks[2].key]).result()
    for medium in (MEDIUM_CPU, MEDIUM_STORAGE):
        subscriber.until(lambda medium=medium: subscriber.removed(medium) == hashes[2:])


def test_missed_events_are_replayed_and_held_chunks_are_in_snapshot(
    user: StoreUser, subscriber: Subscriber
) -> None:
    kept, gone = chunks_of([7] * 128, salt="team-b"), chunks_of([8] * 64)
    for chunks in (kept, gone):
        put(user, chunks)
    user.touch([chunk.key for chunk in kept]).result()
    subscriber.until(lambda: set(subscriber.stored(MEDIUM_STORAGE)) == set(hashes_of(kept)))
    user.drop([chunk.key for chunk in gone]).result()
    subscriber.until(lambda: subscriber.removed(MEDIUM_CPU) == hashes_of(gone))

    replayed = subscriber.ask((0).to_bytes(8, "big"))
    assert [number for number, _ in replayed] == list(range(max(subscriber.received) + 1))
    assert dict(replayed) | subscriber.received == dict(replayed)
    last = max(subscriber.received)
    assert subscriber.ask(last.to_bytes(8, "big")) == [(last, subscriber.received[last])]

    snapshot = subscriber.ask(SNAPSHOT_REQUEST)
    assert {number for number, _ in snapshot} == {last + 1}
    first, *events = [e for _, raw in snapshot for e in subscriber.decoder.decode(raw).events]
    assert isinstance(first, AllBlocksCleared)
    by_medium: dict[str | None, set[int]] = {}
    for event in events:
        assert isinstance(event, BlockStored)
        by_medium.setdefault(event.medium, set()).update(event.block_hashes)
    assert by_medium[MEDIUM_STORAGE] == set(hashes_of(kept))
    assert by_medium[MEDIUM_CPU] > set(hashes_of(kept))
    assert not by_medium[MEDIUM_CPU] & set(hashes_of(gone))
    published = next(event for event in events if event.block_hashes == hashes_of(kept))
    assert (published.token_ids, published.extra_keys) == ([7] * 128, [("team-b",), None])
