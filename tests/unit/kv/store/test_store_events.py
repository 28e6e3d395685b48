"""A store publishes the chunks that its tiers hold; the conductor's index agrees, after a restart
too."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from hypothesis import given, strategies as st
from support.event_requests import request_events
from support.portions import apply_all

from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.event_stream import EventStream
from mooncake_conductor.index.holder_sets import Tier as IndexTier
from mooncake_conductor.index.kv_event_messages import (
    SNAPSHOT_REQUEST,
)
from mooncake_conductor.index.prompt_keys import chain_root, token_keys
from mooncake_conductor.index.published_blocks import PublishedBlocks
from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_event_publisher import KVEventPublisher
from mooncake_kv.kv_events import BlockRemoved, BlockStored, event_key
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.store import ssd_tier
from mooncake_kv.store.chunk_keys import KVIdentity, chunk_keys
from mooncake_kv.store.chunk_store import Chunk, ChunkContent, Tier, WriteHandle
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig
from mooncake_kv.store.store_events import StoreEventBuffer, StoreEventLog

IDENTITY = KVIdentity("llama", "float32", chunk_tokens=64)
NAMESPACE = IDENTITY.root()
CHUNK_BYTES = 1 << 16


def chunks_of(ids: list[int], salt: str = "", identity: KVIdentity = IDENTITY) -> list[Chunk]:
    """The chunks of a prompt, as a pool client puts them."""
    keys = chunk_keys(identity, ids, tenant_salt=salt)
    tokens = np.asarray(ids, "<u4")
    size = identity.chunk_tokens
    return [
        Chunk(
            key,
            keys[at - 1] if at else None,
            at,
            CHUNK_BYTES,
            size,
            salt,
            ChunkContent(identity.root(), tokens[at * size : (at + 1) * size].tobytes()),
        )
        for at, key in enumerate(keys)
    ]


def put(store: NodeStore, chunks: list[Chunk]) -> None:
    user = store.open_user()
    granted = user.reserve(chunks).result()
    user.commit([grant for grant in granted if isinstance(grant, WriteHandle)])
    user.close()


class Reader:
    """Subscribes to a store over its sockets, as the conductor does."""

    def __init__(self, store: NodeStore) -> None:
        events = store.arena.kv_events
        assert events is not None
        assert events.replay_endpoint is not None
        self._endpoint = events.replay_endpoint
        self.index = ChunkIndex(1)
        blocks = PublishedBlocks()
        self.stream = EventStream(
            self.index, 0, blocks, supports_snapshots=True, namespace=NAMESPACE.hex()
        )

    def snapshot(self) -> None:
        found = request_events(self._endpoint, SNAPSHOT_REQUEST)
        assert (
            apply_all(self.stream.apply_snapshot(found[0][0], [batch for _, batch in found]))
            is None
        )
        self.stream.request_snapshot()

    def until(self, tier: IndexTier, keys: tuple[int, ...]) -> None:
        """Wait until the index has exactly these chunks in a tier: events are asynchronous."""
        while self.index.num_held(0, tier) != len(keys) or not all(self.has(tier, k) for k in keys):
            self.snapshot()

    def has(self, tier: IndexTier, key: int) -> bool:
        return self.index._sets.by_number[self.index._table.get(key)].has(0, tier)


def config(path: Path, num_chunks: int = 8, **more) -> NodeStoreConfig:
    events = KVEventsConfig(True, None, f"ipc://{path}/events", f"ipc://{path}/replay")
    return NodeStoreConfig(num_chunks * CHUNK_BYTES, kv_events=events, **more)


def test_index_matches_memory(tmp_path: Path) -> None:
    store = NodeStore(config(tmp_path, num_chunks=4))
    reader = Reader(store)
    first, second = [1] * 192, [2] * 128
    put(store, chunks_of(first))
    reader.until(IndexTier.HOST, token_keys(first))
    put(store, chunks_of(second))  # the end of the first is evicted
    reader.until(IndexTier.HOST, token_keys(first)[:2] + token_keys(second))
    user = store.open_user()
    user.drop([chunk.key for chunk in chunks_of(first)]).result()
    reader.until(IndexTier.HOST, token_keys(second))
    store.close()


def test_events_distinguish_tenants_and_models(tmp_path: Path) -> None:
    store = NodeStore(config(tmp_path))
    reader, ids = Reader(store), [3] * 128
    put(store, chunks_of(ids, identity=KVIdentity("qwen", "float32", chunk_tokens=64)))
    put(store, chunks_of(ids, salt="team-a"))
    reader.until(IndexTier.HOST, token_keys(ids, chain_root("", "team-a")))
    assert reader.stream.stats.num_skipped
    store.close()


def test_restarted_store_publishes_its_ssd_chunks_in_batches(tmp_path: Path, monkeypatch) -> None:
    """The events of millions of chunks at once are gigabytes."""
    (tmp_path / "ssd").mkdir()
    directory = SsdDirectoryConfig(tmp_path / "ssd", 64 << 20, 16 << 20, min_free_bytes=0)
    wanted = config(tmp_path, ssd=SsdConfig((directory,)))
    ids = list(range(512))
    store = NodeStore(wanted)
    reader = Reader(store)
    for _ in range(2):
        put(store, chunks_of(ids))
    reader.until(IndexTier.DISK, token_keys(ids))
    store.close()
    log: list[object] = []
    publish, await_sent = KVEventPublisher.publish, KVEventPublisher.await_sent

    def noted(publisher, events):
        log.append(sum(len(event.block_hashes) for event in events))
        publish(publisher, events)

    def waited(publisher, num_left, timeout):
        log.append(await_sent(publisher, num_left, timeout))
        return log[-1]

    monkeypatch.setattr(ssd_tier, "CHUNKS_PER_REPORT", 3)
    monkeypatch.setattr(KVEventPublisher, "publish", noted)
    monkeypatch.setattr(KVEventPublisher, "await_sent", waited)
    store = NodeStore(wanted)
    assert log == [3, True, 3, True, 2, True]
    Reader(store).until(IndexTier.DISK, token_keys(ids))
    store.close()


def test_restarted_store_publishes_its_ssd_chunks(tmp_path: Path) -> None:
    (tmp_path / "ssd").mkdir()
    directory = SsdDirectoryConfig(tmp_path / "ssd", 64 << 20, 16 << 20, min_free_bytes=0)
    wanted = config(tmp_path, ssd=SsdConfig((directory,)))
    ids = list(range(256))
    store = NodeStore(wanted)
    reader = Reader(store)
    put(store, chunks_of(ids))
    put(store, chunks_of(ids))  # used again, so copied to an SSD
    reader.until(IndexTier.DISK, token_keys(ids))
    reader.until(IndexTier.HOST, token_keys(ids))
    store.close()
    store = NodeStore(wanted)
    reader = Reader(store)
    reader.until(IndexTier.DISK, token_keys(ids))
    reader.until(IndexTier.HOST, ())
    user = store.open_user()
    handles = user.pin([chunk.key for chunk in chunks_of(ids)]).result(20)
    assert None not in handles
    reader.until(IndexTier.HOST, token_keys(ids))
    user.close()
    store.close()


def test_one_event_covers_a_run_and_names_its_salt() -> None:
    batches: list = []
    log = StoreEventLog(batches.append)
    chunks = chunks_of([5] * 192, salt="team-a")
    log.stored(Tier.DRAM, [*chunks[:2], chunks_of([6] * 64)[0]])
    log.removed(Tier.SSD, [])
    log.removed(Tier.SSD, [chunks[0].key])
    (run, alone), (removed,) = batches
    assert isinstance(run, BlockStored)
    assert run.block_hashes == [event_key(chunk.key) for chunk in chunks[:2]]
    assert (run.medium, run.extra_keys, len(run.token_ids)) == ("CPU", [["team-a"], None], 128)
    assert (run.namespace, alone.extra_keys) == (NAMESPACE.hex(), None)
    assert removed == BlockRemoved([event_key(chunks[0].key)], "STORAGE")


def test_dead_publisher_does_not_affect_the_store(caplog) -> None:
    def publish(events: list) -> None:
        raise KVConfigError("the thread is gone")

    log = StoreEventLog(publish)
    with caplog.at_level(logging.WARNING):
        log.stored(Tier.DRAM, chunks_of([7] * 64))
        log.stored(Tier.DRAM, chunks_of([8] * 64))
    assert [record.message for record in caplog.records] == [
        "this store publishes no more KV events: the thread is gone"
    ]


MEDIUMS = {Tier.DRAM: "CPU", Tier.SSD: "STORAGE"}


@given(st.lists(st.tuples(st.sampled_from(Tier), st.integers(0, 5), st.booleans(), st.booleans())))
def test_taken_events_match_the_store_whenever_they_are_taken(steps: list) -> None:
    """Steps: the tier, the chunk, whether it is stored or removed, and whether events are taken."""
    chunks, buffer = chunks_of(list(range(64 * 6))), StoreEventBuffer()
    wanted: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    announced: dict[str | None, set[int]] = {medium: set() for medium in MEDIUMS.values()}
    for tier, number, comes, is_taken in [*steps, (Tier.DRAM, 0, True, True)]:
        chunk = chunks[number]
        if comes:
            buffer.stored(tier, [chunk])
            wanted[tier].add(event_key(chunk.key))
        else:
            buffer.removed(tier, [chunk.key])
            wanted[tier].discard(event_key(chunk.key))
        if not is_taken:
            continue
        for event in buffer.take(NAMESPACE):
            if isinstance(event, BlockStored):
                announced[event.medium] |= {*event.block_hashes}
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            else:
                assert announced[event.medium] >= {*event.block_hashes}, (
                    "removed, but never published as stored"
                )
                announced[event.medium] -= {*event.block_hashes}
        assert announced == {MEDIUMS[tier]: held for tier, held in wanted.items()}
    assert buffer.take(NAMESPACE) == []


def test_chunks_still_stored_are_published_again() -> None:
    chunks, buffer = chunks_of([9] * 256), StoreEventBuffer()
    buffer.stored(Tier.DRAM, chunks[:3])
    buffer.take(NAMESPACE)
    buffer.removed(Tier.DRAM, [chunks[2].key])
    buffer.stored(Tier.SSD, chunks[3:])
    buffer.publish_again()
    announced = [(event.medium, event.block_hashes) for event in buffer.take(NAMESPACE)]
    memory, ssd = ([event_key(chunk.key) for chunk in each] for each in (chunks[:2], chunks[3:]))
    assert announced == [("CPU", memory), ("STORAGE", ssd)]
    assert buffer.take(NAMESPACE) == []
    buffer.removed(Tier.DRAM, [chunks[0].key])
    assert [type(event) for event in buffer.take(NAMESPACE)] == [BlockRemoved]


def test_chunk_stored_and_removed_between_two_takes_causes_no_event() -> None:
    chunks, buffer = chunks_of([9] * 192), StoreEventBuffer()
    for _ in range(3):
        buffer.stored(Tier.DRAM, chunks)
        buffer.removed(Tier.DRAM, [chunk.key for chunk in chunks])
    assert buffer.take(NAMESPACE) == []


def test_engine_does_not_publish_another_models_chunks() -> None:
    other = KVIdentity("qwen", "float32", chunk_tokens=64)
    buffer, theirs = StoreEventBuffer(), chunks_of([9] * 128, identity=other)
    buffer.stored(Tier.DRAM, theirs)
    buffer.removed(Tier.DRAM, [theirs[0].key])
    assert buffer.take(NAMESPACE) == []
    buffer.removed(Tier.DRAM, [theirs[1].key])
    assert buffer.take(NAMESPACE) == []
