"""The chunks that a load may read: the leading ones that still exist, over all stores."""

import asyncio

import pytest

from mooncake_kv.pool.pinned_chunks import pin_chunks
from mooncake_kv.pool.pool_events import ChunkSource, LoadRequest
from mooncake_kv.store.chunk_store import Chunk, Tier
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig

NBYTES = 4096
KEYS = [bytes([number]) * 16 for number in range(6)]


@pytest.fixture
def stores():
    """Two stores that hold alternate chunks."""
    stores = [NodeStore(NodeStoreConfig(8 * NBYTES)) for _ in range(2)]
    for position, key in enumerate(KEYS):
        user = stores[position % 2].open_user()
        assert user.commit(user.reserve([Chunk(key, None, position, NBYTES, 16)]).result()).result()
    yield stores
    for store in stores:
        store.check_integrity()
        store.close()


@pytest.mark.parametrize("gone", range(1, 7))
def test_chunks_after_a_missing_one_are_released(stores, gone):
    sources = [ChunkSource(position % 2, Tier.DRAM) for position in range(len(KEYS))]
    load = LoadRequest("load", "request", KEYS, sources, 1, 0, (), 10.0, None)
    users = [store.open_user() for store in stores]
    for user in users:
        user.drop(KEYS[gone : gone + 1])

    async def run():
        pinned = await pin_chunks(load, users.__getitem__, 10.0, NBYTES)
        assert sorted(pinned.handles) == list(range(1, gone))
        assert sum(store.stats().num_pins for store in stores) == gone - 1
        assert await pinned.release()

    asyncio.run(run())
    assert sum(store.stats().num_pins for store in stores) == 0
