"""The stores that an instance uses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from support.kv_rank import wait_for

from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.session.processes import ProcessName, this_process
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.pool.pool_config import KVPoolConfig
from mooncake_kv.pool.pool_events import ChunkSource, PoolStats, StoreReport
from mooncake_kv.pool.pool_stores import PoolStores, fitting_sources
from mooncake_kv.store.chunk_store import Tier
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.store_service import StoreAddress, StoreService

RANKS = [structs.replace(this_process(), pid=pid) for pid in range(1, 5)]
"""Process ids: two per data-parallel rank."""


@pytest.fixture
def service() -> Iterator[StoreService]:
    store = NodeStore(NodeStoreConfig(1 << 20))
    transports = Transports.open(Registry.discover(), EndpointOptions(), wanted="shm")
    made = StoreService.start(store, transports, StoreAddress("127.0.0.1", 0, b""))
    yield made
    for opened in (made, transports, store):
        opened.close()


def writers(service: StoreService) -> list[ProcessName]:
    """The writers of the store's only user."""
    [user] = service._users.values()
    return list(user.writers)


def test_data_parallel_ranks_sharing_a_store_name_processes_of_all(
    service: StoreService,
) -> None:
    """Memory that any of these processes may write to is kept until that process has exited."""
    config = KVPoolConfig(connect=(("127.0.0.1", service.port),))
    stores = PoolStores(config, Registry.discover(), "here")
    stores.name_writers(RANKS[:2])
    stores.name_writers(RANKS[2:])
    stores.name_writers(RANKS[:2])
    wait_for(lambda: writers(service) == RANKS)
    [session] = service._users
    service._loop.call("", session.close, "cut off")
    wait_for(lambda: service._users and session not in service._users)
    wait_for(lambda: writers(service) == RANKS)
    stores.close()


def test_lost_store_is_counted_as_not_connected(service: StoreService) -> None:
    config = KVPoolConfig(dram_bytes=1 << 20, connect=(("127.0.0.1", service.port),))
    stores = PoolStores(config, Registry.discover(), "here")
    assert (len(stores.all), stores.num_connected) == (2, 2)
    service.close()
    wait_for(lambda: stores.num_connected == 1)
    stores.close()


@pytest.mark.parametrize(
    ("host", "is_reachable"), [("127.0.0.1", False), ("localhost", False), ("store.test", True)]
)
def test_store_is_connected_by_address_and_by_name(
    host: str, is_reachable: bool, service: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo
    names = {"store.test": "127.0.0.1"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda name, *rest, **kw: resolve(names.get(name, name), *rest, **kw)
    )
    stores = PoolStores(KVPoolConfig(connect=((host, service.port),)), Registry.discover(), "here")
    [report] = stores.reports
    location = report.location
    assert stores.num_connected == 1
    stores.close()
    assert (location is not None) == is_reachable
    assert location is None or (location.host, location.port) == (host, service.port)


def test_stores_that_can_be_used_are_reported(service: StoreService) -> None:
    """The home store first, even while it can't be used: that it is lost is known, too."""
    store = service._store
    events = KVEventEndpoints("tcp://*:5557")
    store.metrics_address, store._publisher = "*:7702", SimpleNamespace(endpoints=events)
    address = ("127.0.0.1", service.port)
    away = ("127.0.0.1", 1)
    known = StoreReport(None, events, "*:7702")
    for connect, dram_bytes, wanted in (
        ((address,), 0, [known]),
        ((address, away), 0, [known]),
        ((away, address), 0, [StoreReport(), known]),
        ((address, away), 1 << 20, [StoreReport(), known]),
    ):
        config = KVPoolConfig(dram_bytes=dram_bytes, connect=connect)
        stores = PoolStores(config, Registry.discover(), "here")
        assert [*stores.reports] == wanted
        assert stores.publishes_saves == (not dram_bytes), "those that go to the other store, too"
        stores.close()
    store._publisher = None


def test_stores_that_ranks_share_are_counted_once() -> None:
    rank = PoolStats(num_loads=3, num_stores=2, num_connected_stores=1)
    assert rank + rank == PoolStats(num_loads=6, num_stores=2, num_connected_stores=1)


def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = KVPoolConfig(dram_bytes=1 << 20, port=port)
        with pytest.raises(KVConfigError, match=f"--kv-pool: port {port} on 127.0.0.1 is in use"):
            PoolStores(config, Registry.discover(), "here")


@pytest.mark.parametrize(("first", "wanted"), [(0, 3), (1, 4), (3, 6), (5, 6), (6, 6)])
def test_load_has_no_more_chunks_than_fit_into_the_memory_of_their_stores(
    first: int, wanted: int
) -> None:
    """Store 0 has memory for three chunks, store 1 can't be reached, store 2 is a hinted one."""
    stores: Any = [
        SimpleNamespace(arena=SimpleNamespace(nbytes=3 << 20)),
        SimpleNamespace(arena=None),
    ]
    on_ssd = [ChunkSource(0, Tier.SSD)] * 6
    assert len(fitting_sources(on_ssd, first, stores, (1 << 20) - 1)) == wanted
    for elsewhere in (1, 2):
        far = [ChunkSource(elsewhere, Tier.DRAM)] * 6
        assert fitting_sources(far, first, stores, 1 << 20) == far
