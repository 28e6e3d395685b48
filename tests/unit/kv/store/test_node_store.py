"""A node store in this process: KV put by one rank is read by another over a real transport."""

import numpy as np
import pytest
from msgspec import structs

from mooncake_hal import host_memory
from mooncake_hal.host_memory import memory_bytes
from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Spans
from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.chunk_store import (
    Chunk,
    ChunkContent,
    CopyTerms,
    PutRefusal,
    Residence,
    Tier,
)
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig

CHUNK_BYTES = 64 << 10


def chunk(number, parent=None, tenant=""):
    key = number.to_bytes(16, "big")
    before = None if parent is None else parent.to_bytes(16, "big")
    return Chunk(key, before, 0 if parent is None else 1, CHUNK_BYTES, 16, tenant)


def spans(memory, arena, handle):
    def one(value):
        return np.array([value], np.uint64)

    return Spans(one(memory.ctypes.data), one(arena.address + handle.offset), one(handle.nbytes))


@pytest.fixture
def store():
    store = NodeStore(NodeStoreConfig(dram_bytes=4 * CHUNK_BYTES))
    yield store
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_put_chunk_is_read_over_a_transport(store, name):
    registry = Registry.discover()
    options = EndpointOptions(secret=b"secret")
    served = Transports.open(registry, options, wanted=name)
    rank = Transports.open(registry, options, wanted=name)
    try:
        store.offer(served)
        memory = np.random.default_rng(3).integers(0, 255, CHUNK_BYTES, np.uint8)
        target = np.zeros(CHUNK_BYTES, np.uint8)
        for array in (memory, target):
            rank.register(MemoryRegion(array.ctypes.data, array.nbytes))
        user = store.open_user()
        peer = rank.connect(user.arena.endpoints, timeout=20).peer
        (handle,) = user.reserve([chunk(1)]).result()
        peer.write(spans(memory, user.arena, handle), timeout=20).wait()
        assert user.probe([chunk(1).key]).result() == [Residence.STAGING]
        assert user.commit([handle]).result() == [True]
        (found,) = user.pin([chunk(1).key]).result()
        peer.read(spans(target, user.arena, found), timeout=20).wait()
        assert user.release([found]).result() == [True]
        assert np.array_equal(memory, target)
    finally:
        rank.close()
        served.close()


def test_stats_count_puts_hits_and_evictions(store):
    user = store.open_user()
    handles = user.reserve([chunk(n) for n in range(5)]).result()
    assert handles[4] is PutRefusal.NO_SPACE
    assert user.commit(handles[:3]).result() == [True] * 3
    assert user.abort(handles[3:4]).result() == [True]
    pinned = user.pin([chunk(0).key, chunk(9).key]).result()
    assert pinned[1] is None
    stats = user.stats().result()
    assert (stats.num_chunks, stats.num_staging, stats.num_pins) == (3, 0, 1)
    assert (stats.num_dram_hits, stats.num_misses, stats.num_puts, stats.num_aborts) == (1, 1, 3, 1)
    assert stats.free_bytes == CHUNK_BYTES
    assert stats.num_refused_puts == {"no_space": 1}
    assert user.drop([chunk(1).key, chunk(7).key]).result() == 1
    user.close()
    assert user.stats().result().num_pins == 0


def test_other_users_get_the_lock_while_many_chunks_are_dropped(store, monkeypatch):
    monkeypatch.setattr("mooncake_kv.store.node_store.CHUNKS_PER_DROP", 1)
    user = store.open_user()
    user.commit(user.reserve([chunk(n) for n in range(4)]).result())
    left = []

    def others_turn(seconds):
        assert seconds > 0
        assert store._lock.acquire(blocking=False)
        store._lock.release()
        left.append(len(store.chunks()[Tier.DRAM]))

    monkeypatch.setattr("mooncake_kv.store.node_store.time.sleep", others_turn)
    keys = [chunk(n).key for n in (0, 1, 1, 9, 3)]
    assert user.drop(keys).result() == 3
    assert left == [3, 2, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tenant": "t" * 513}, "a tenant's name of up to 512 bytes, got 513"),
        ({"key": bytes(65)}, "wanted keys of 1 to 64 bytes"),
        ({"content": ChunkContent(bytes(65), bytes(64))}, "a namespace of up to 64 bytes, got 65"),
        ({"content": ChunkContent(bytes(16), bytes(60))}, "wanted 64 bytes for 16 tokens, got 60"),
    ],
)
def test_chunk_too_large_for_a_record_is_rejected(changes, words):
    facts = structs.asdict(chunk(1)) | changes
    with pytest.raises(ValueError, match=words):
        Chunk(**facts)


def test_observer_is_notified_of_chunks_in_memory():
    seen = []

    class Observer:
        def stored(self, tier, chunks):
            for what in chunks:
                seen.append(("stored", tier, what.key, what.parent, what.num_tokens))

        def removed(self, tier, keys):
            seen.append(("removed", tier, *keys))

    store = NodeStore(NodeStoreConfig(dram_bytes=CHUNK_BYTES), observer=Observer())
    user = store.open_user()
    user.commit(user.reserve([chunk(1)]).result())
    user.commit(user.reserve([chunk(2, parent=7)]).result())
    store.close()
    first, second, parent = (n.to_bytes(16, "big") for n in (1, 2, 7))
    assert seen == [
        ("stored", Tier.DRAM, first, None, 16),
        ("removed", Tier.DRAM, first),
        ("stored", Tier.DRAM, second, parent, 16),
    ]


def test_store_larger_than_its_cgroup_limit_is_rejected(monkeypatch):
    """Otherwise it would start, and be killed once it holds that many chunks."""
    available, _ = memory_bytes()
    monkeypatch.setattr(host_memory, "_cgroup_bytes", lambda: (available // 4, 0))
    with pytest.raises(KVConfigError, match=f"to {available // 4} bytes, within the limit"):
        NodeStore(NodeStoreConfig(dram_bytes=available // 2))


def test_invalid_store_settings_are_rejected():
    with pytest.raises(KVConfigError, match="this host can provide"):
        NodeStore(NodeStoreConfig(dram_bytes=1 << 60))
    with pytest.raises(KVConfigError, match="'fifo' is not known; known are"):
        NodeStore(NodeStoreConfig(dram_bytes=CHUNK_BYTES, policy="fifo"))


def test_replica_serves_chunk_by_chunk():
    """While a store still copies the end of a sequence, others fetch the start from it."""
    numbers = (1, 2, 3)
    chunks = [chunk(n, None if n == 1 else n - 1) for n in numbers]
    first, second, third = (NodeStore(NodeStoreConfig(4 * CHUNK_BYTES)) for _ in range(3))
    registry, options = Registry.discover(), EndpointOptions(secret=b"secret")
    served = [Transports.open(registry, options, wanted="shm") for _ in range(3)]
    for store, transports in zip((first, second, third), served, strict=True):
        store.offer(transports)
    try:
        origin = first.open_user()
        for number, handle in zip(numbers, origin.reserve(chunks).result(), strict=True):
            first.memory.view(handle.offset, CHUNK_BYTES)[:] = bytes([number]) * CHUNK_BYTES
            origin.commit([handle])
        copying = second.open_user()
        grants = copying.reserve(chunks, copy=CopyTerms(1, 0.1, 1.0)).result()
        fetch(served[1], second, first, chunks[0].key, copying, grants[0])
        found = copying.probe([c.key for c in chunks]).result()
        assert found == [Residence.DRAM, Residence.STAGING, Residence.STAGING]
        reader = third.open_user()
        (grant,) = reader.reserve(chunks[:1], copy=CopyTerms(2, 0.1, 1.0)).result()
        fetch(served[2], third, second, chunks[0].key, reader, grant)
        assert bytes(third.memory.view(grant.offset, CHUNK_BYTES)) == bytes([1]) * CHUNK_BYTES
    finally:
        for transports in served:
            transports.close()
        for store in (first, second, third):
            store.close()


def fetch(transports, store, source, key, user, grant):
    """Copy a chunk from one store's memory into another's, and commit it."""
    other = source.open_user()
    (handle,) = other.pin([key]).result()
    peer = transports.connect(source.arena.endpoints, timeout=20).peer
    rows = (store.arena.address + grant.offset, source.arena.address + handle.offset, CHUNK_BYTES)
    peer.read(Spans(*(np.array([value], np.uint64) for value in rows)), timeout=20).wait()
    assert other.release([handle]).result() == [True]
    assert user.commit([grant]).result() == [True]
