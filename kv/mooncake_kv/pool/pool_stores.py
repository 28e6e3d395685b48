"""The stores that an instance uses: its own and those that it connects to, or a Mooncake Store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from mooncake_hal.errors import HalError
from mooncake_hal.negotiation import AUTO, Transports
from mooncake_hal.registry import Registry
from mooncake_hal.session.addressing import is_loopback
from mooncake_hal.session.processes import ProcessName
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.pool.device_staging import host_transports
from mooncake_kv.pool.hinted_stores import HintRule
from mooncake_kv.pool.pool_config import KVPoolConfig
from mooncake_kv.pool.pool_events import StoreLocation
from mooncake_kv.store.chunk_store import ChunkStore, StoreObserver, StoreStats
from mooncake_kv.store.chunk_table import QUARANTINE_MARGIN_S
from mooncake_kv.store.mooncake_store import MooncakeChunkStore, MooncakeStoreConfig
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_service import StoreAddress, StoreService

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""How long the start of an instance waits for each store; one that comes later is found then."""


STATS_AGE_S = 0.5
"""Counters are asked for at the end of every request; a store's cost more than that."""

MIN_QUARANTINE_S = 30.0


def own_store(config: KVPoolConfig, kv_events: KVEventsConfig | None = None) -> NodeStoreConfig:
    """The store in this instance. Freed memory rests for longer than a transfer may take."""
    directories = tuple(
        SsdDirectoryConfig(path, size, min_free_bytes=config.ssd_min_free_bytes)
        for path, size in config.ssd
    )
    return NodeStoreConfig(
        config.dram_bytes,
        config.policy,
        _quarantine_s(config.network),
        dict(config.quotas),
        SsdConfig(directories, config.ssd_write_bytes_per_day) if directories else None,
        kv_events=kv_events,
    )


def _quarantine_s(network: KVTransferConfig) -> float:
    return max(MIN_QUARANTINE_S, network.transfer_timeout_s + QUARANTINE_MARGIN_S)


class PoolStores:
    """Opened in the order of the configuration.

    Args:
        config: which.
        registry: of transports.
        name: of this instance, for the stores' logs.
        kv_events: where the store in this instance publishes what it holds.
        observer: told what that store holds, if it doesn't publish.

    Raises:
        KVConfigError: the store in this instance can't be had as asked.
    """

    def __init__(
        self,
        config: KVPoolConfig,
        registry: Registry,
        name: str,
        kv_events: KVEventsConfig | None = None,
        observer: StoreObserver | None = None,
    ) -> None:
        self._undo = ExitStack()
        self._own: NodeStore | None = None
        self._own_stats: tuple[float, StoreStats] | None = None
        self._writers: tuple[ProcessName, ...] = ()
        self._naming = threading.Lock()
        has_own = config.dram_bytes and not config.mooncake_store
        self._observer = observer if has_own else None
        self._secret = config.network.secret.encode()
        self.hint_rule = HintRule(config.source_allow, has_secret=bool(self._secret))
        """Which stores a request may name besides."""
        self._name = name
        self._transfer_timeout_s = config.network.transfer_timeout_s
        self._listens: tuple[str, int] | None = None
        if config.connect and not config.dram_bytes and not is_loopback(config.connect[0][0]):
            self._listens = config.connect[0]
        self.all: list[ChunkStore] = []
        """Where KV is loaded from; the first is ``home``."""
        with ExitStack() as undo:
            if config.mooncake_store:
                self.all.append(_open_mooncake_store(config, registry, undo))
            elif config.dram_bytes:
                self.all.append(
                    self._open_own(config, own_store(config, kv_events), registry, undo)
                )
            clients = [self.connect(host, port) for host, port in config.connect]
            for client, (host, port) in zip(clients, config.connect, strict=True):
                undo.callback(client.close)
                self.all.append(client)
                if not client.await_store(CONNECT_S):
                    logger.warning(
                        "no store replies at %s port %d: nothing is loaded from there until one "
                        "does",
                        host,
                        port,
                    )
            self._undo = undo.pop_all()

    @property
    def home(self) -> ChunkStore:
        """Where KV is saved."""
        return self.all[0]

    @property
    def home_location(self) -> StoreLocation | None:
        """Where instances on other hosts find what this one saves; None: they can't."""
        arena = self.home.arena
        if self._listens is None or arena is None:
            return None
        return StoreLocation(*self._listens, arena.epoch)

    @property
    def home_kv_events(self) -> KVEventEndpoints | None:
        """Where ``home`` publishes what it holds; None: nowhere, or it can't be reached now."""
        arena = self.home.arena
        return None if arena is None else arena.kv_events

    @property
    def tells_what_is_saved(self) -> bool:
        """Whether somebody follows what ``home`` holds, so that saves say their tokens."""
        return self._observer is not None or self.home_kv_events is not None

    def own_stats(self) -> StoreStats | None:
        """What the store in this instance counts, up to STATS_AGE_S ago; None: there is none. Any
        thread."""
        now, found = time.monotonic(), self._own_stats
        if self._own is not None and (found is None or now - found[0] > STATS_AGE_S):
            found = self._own_stats = now, self._own.stats()
        return None if found is None else found[1]

    def connect(self, host: str, port: int) -> StoreClient:
        """A client of a store of this deployment, which its caller closes."""
        address = StoreAddress(host, port, self._secret)
        return StoreClient(address, self._name, transfer_timeout_s=self._transfer_timeout_s)

    def name_writers(self, ranks: Sequence[ProcessName]) -> None:
        """Tell the stores in other processes who is going to write to them, besides those that were
        named before: data-parallel ranks share this object, each with processes of its own. The
        store in this process ends after its ranks. Any thread."""
        with self._naming:
            self._writers = tuple(dict.fromkeys((*self._writers, *ranks)))
            for store in self.all:
                if isinstance(store, StoreClient):
                    store.name_writers(self._writers)

    def close(self) -> None:
        """Leave all stores; the own one ends. Idempotent."""
        self._undo.close()

    def _open_own(
        self, config: KVPoolConfig, wanted: NodeStoreConfig, registry: Registry, undo: ExitStack
    ) -> ChunkStore:
        network = config.network
        store = self._own = NodeStore(wanted, observer=self._observer)
        undo.callback(store.close)
        with _reachable():
            transports = _open_transports(network, registry)
            undo.callback(transports.close)
            if config.port is None:
                store.offer(transports)
            else:
                address = StoreAddress(network.host, config.port, self._secret)
                service = StoreService.start(store, transports, address)
                undo.callback(service.close)
                self._listens = (network.advertise_host or network.host, service.port)
                logger.info("the store of this instance listens on port %d", service.port)
        user = store.open_user()
        undo.callback(user.close)
        return user


def _open_mooncake_store(
    config: KVPoolConfig, registry: Registry, undo: ExitStack
) -> MooncakeChunkStore:
    """A client of a Mooncake Store, whose staging memory this instance's ranks reach."""
    network = config.network
    store = MooncakeChunkStore(
        MooncakeStoreConfig(
            config.mooncake_store,
            host=network.advertise_host or network.host,
            segment_bytes=config.dram_bytes,
            staging_bytes=config.staging_bytes,
            protocol=config.protocol,
            quarantine_s=_quarantine_s(network),
        )
    )
    undo.callback(store.close)
    with _reachable():
        transports = _open_transports(network, registry)
        undo.callback(transports.close)
        store.offer(transports)
    return store


def _open_transports(network: KVTransferConfig, registry: Registry) -> Transports:
    """Ways to this instance's host memory."""
    forced = host_transports(network.transports)
    options = EndpointOptions(
        host=network.host,
        advertise_host=network.advertise_host or None,
        port_range=network.port_range,
        secret=network.secret.encode(),
        allow_no_secret=network.allow_no_secret,
    )
    wanted = forced[0] if len(forced) == 1 else AUTO
    return Transports.open(registry, options, wanted=wanted, allowed=forced or None)


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except (HalError, ValueError, OSError) as exc:
        raise KVConfigError(f"--kv-pool: this instance's store can't be reached: {exc}") from exc
