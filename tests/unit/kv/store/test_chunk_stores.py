"""The conformance suite of chunk stores, over a node store in this process and one behind
sessions."""

import pytest
from support.chunk_store_suite import NBYTES, SECRET, ChunkStoreSuite, OpenedPool

from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.mooncake_store import MooncakeChunkStore, MooncakeStoreConfig
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_service import StoreAddress, StoreService

POOL_BYTES = 16 * NBYTES


@pytest.fixture
def node_store():
    store = NodeStore(NodeStoreConfig(POOL_BYTES))
    transports = Transports.open(Registry.discover(), EndpointOptions(secret=SECRET), wanted="shm")
    yield store, transports
    transports.close()
    store.check_integrity()
    store.close()


class TestNodeStore(ChunkStoreSuite):
    @pytest.fixture
    def pool(self, node_store):
        store, transports = node_store
        store.offer(transports)
        users = store.open_user(), store.open_user()
        yield OpenedPool(*users, POOL_BYTES)
        for user in users:
            user.close()


class TestStoreClient(ChunkStoreSuite):
    @pytest.fixture
    def pool(self, node_store):
        service = StoreService.start(*node_store, StoreAddress("127.0.0.1", 0, SECRET))
        address = StoreAddress("127.0.0.1", service.port, SECRET)
        clients = StoreClient(address), StoreClient(address)
        assert all(client.await_store(60) for client in clients)
        yield OpenedPool(*clients, POOL_BYTES)
        for client in clients:
            client.close()
        service.close()


def test_mooncake_store_without_client_names_package_to_install():
    with pytest.raises(KVConfigError, match=r"pip install mooncake-transfer-engine"):
        MooncakeChunkStore(MooncakeStoreConfig("127.0.0.1:1"))
