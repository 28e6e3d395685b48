"""The stores that an instance uses: its own and those that it connects to, or a Mooncake Store.

``PoolStores`` opens them as ``--kv-pool`` says, and ``PoolClient`` uses them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from mooncake_hal.errors import HalError, PortsExhausted
from mooncake_hal.negotiation import AUTO, Transports
from mooncake_hal.registry import Registry
from mooncake_hal.session.processes import ProcessName
from mooncake_hal.transport import EndpointOptions
from mooncake_kv.allowed_hosts import is_loopback_host
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import KVConfigError
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.pool.device_staging import host_transports
from mooncake_kv.pool.hinted_stores import HintRule
from mooncake_kv.pool.pool_config import KVPoolConfig
from mooncake_kv.pool.pool_events import ChunkSource, StoreLocation, StoreReport
from mooncake_kv.store.arena_allocator import rounded_up
from mooncake_kv.store.chunk_store import ChunkStore, Residence, StoreObserver, StoreStats
from mooncake_kv.store.chunk_table import QUARANTINE_MARGIN_S
from mooncake_kv.store.mooncake_store import (
    NO_METADATA_SERVER,
    MooncakeChunkStore,
    MooncakeStoreConfig,
)
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.ssd_config import SsdConfig, SsdDirectoryConfig
from mooncake_kv.store.store_client import StoreClient
from mooncake_kv.store.store_service import StoreAddress, StoreService

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
"""Seconds that the start of an instance waits for each store. A store that starts later is
connected in the background."""


STATS_AGE_S = 0.5
"""Maximum age in seconds of the own store's counters. They are read at the end of every request,
and collecting them each time would cost more than that."""

MIN_QUARANTINE_S = 30.0
"""Lower bound of the own store's quarantine in seconds, for short transfer timeouts."""


def own_store(config: KVPoolConfig, kv_events: KVEventsConfig | None = None) -> NodeStoreConfig:
    """The configuration of the store in this instance. Its quarantine exceeds the transfer
    timeout."""
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


def store_to_save_to(stores: Sequence[ChunkStore]) -> int | None:
    """Number of the store to save to: the first, or while it can't be reached the next one that
    can; None if none can."""
    return next((n for n, store in enumerate(stores) if store.arena is not None), None)


def fitting_sources(
    sources: Sequence[ChunkSource], first: int, stores: Sequence[ChunkStore], chunk_bytes: int
) -> Sequence[ChunkSource]:
    """The leading chunks of which a load that begins with chunk ``first`` can have all in their
    stores' memory at once: the staging memory of a Mooncake Store, or the memory of a store with
    more on SSDs, may be smaller than a prompt."""
    arenas = {number: store.arena for number, store in enumerate(stores)}
    num_taken: Counter[int] = Counter()
    for position, source in enumerate(sources[first:], first):
        num_taken[source.store] += 1
        arena = arenas.get(source.store)
        if arena is not None and num_taken[source.store] * rounded_up(chunk_bytes) > arena.nbytes:
            return sources[:position]
    return sources


async def held_elsewhere(
    stores: Sequence[ChunkStore], keys: Sequence[bytes], number: int
) -> Counter[bytes]:
    """How many stores other than that of this number have each chunk, or are receiving it."""
    probes = [store.probe(keys) for n, store in enumerate(stores) if n != number]
    found: Counter[bytes] = Counter()
    for probe in probes:
        places = await asyncio.wrap_future(probe)
        found.update(k for k, p in zip(keys, places, strict=True) if p is not Residence.ABSENT)
    return found


class PoolStores:
    """All stores of one instance, shared by its data-parallel ranks.

    Args:
        config: the stores to open.
        registry: registry of transports.
        name: name of this instance in the stores' logs.
        kv_events: where the store in this instance publishes KV events.
        observer: notified of what that store holds, if it does not publish events itself.

    Raises:
        KVConfigError: the store in this instance can't be opened as configured.
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
        """The rule for additional stores that requests may name."""
        self._name = name
        self._transfer_timeout_s = config.network.transfer_timeout_s
        self._reachable_at: list[tuple[str, int] | None] = []
        """By store: the address at which instances on other hosts reach it; None if they can't."""
        self.all: list[ChunkStore] = []
        """The stores to load from, in the order of the configuration; the first one is ``home``."""
        with ExitStack() as undo:
            if config.mooncake_store:
                self.all.append(_open_mooncake_store(config, registry, undo))
                self._reachable_at.append(None)
            elif config.dram_bytes:
                self.all.append(
                    self._open_own(config, own_store(config, kv_events), registry, undo)
                )
            clients = [self.connect(host, port) for host, port in config.connect]
            for client, (host, port) in zip(clients, config.connect, strict=True):
                undo.callback(client.close)
                self.all.append(client)
                self._reachable_at.append(None if is_loopback_host(host) else (host, port))
                if not client.await_store(CONNECT_TIMEOUT_S):
                    logger.warning(
                        "no store replies at %s port %d, its chunks are misses until it is "
                        "connected: %s",
                        host,
                        port,
                        client.last_error,
                    )
            self._undo = undo.pop_all()

    @property
    def home(self) -> ChunkStore:
        """The store to which KV is saved while it can be used; see
        ``store_to_save_to``."""
        return self.all[0]

    @property
    def num_connected(self) -> int:
        """How many of the stores can be used now."""
        return sum(store.arena is not None for store in self.all)

    @property
    def reports(self) -> tuple[StoreReport, ...]:
        """What routers should know of the stores: of ``home`` first, with nothing in it while it
        can't be used, then of the others that can be used now."""
        found = []
        for store, address in zip(self.all, self._reachable_at, strict=True):
            if (arena := store.arena) is not None:
                location = None if address is None else StoreLocation(*address, arena.epoch)
                found.append(StoreReport(location, arena.kv_events, arena.metrics))
            elif store is self.home:
                found.append(StoreReport())
        return tuple(found)

    @property
    def publishes_saves(self) -> bool:
        """Whether a store that saves may go to publishes events, or this instance's own does, so
        that saves must include their tokens. The store is chosen later, and may be another one by
        then if the first can't be reached."""
        stores = self.all[:1] if self._own is not None else self.all
        arenas = (store.arena for store in stores)
        return self._observer is not None or any(
            arena is not None and arena.kv_events is not None for arena in arenas
        )

    def own_stats(self) -> StoreStats | None:
        """Counters of the store in this instance, at most STATS_AGE_S old; None if there is no such
        store. Thread-safe."""
        now, found = time.monotonic(), self._own_stats
        if self._own is not None and (found is None or now - found[0] > STATS_AGE_S):
            found = self._own_stats = now, self._own.stats()
        return None if found is None else found[1]

    def connect(self, host: str, port: int) -> StoreClient:
        """Create a client of a store of this deployment. The caller closes it."""
        address = StoreAddress(host, port, self._secret)
        return StoreClient(address, self._name, transfer_timeout_s=self._transfer_timeout_s)

    def name_writers(self, ranks: Sequence[ProcessName]) -> None:
        """Declare additional writer processes to the stores in other processes. Each data-parallel
        rank that shares this object adds its own. The store in this process does not need them,
        since it is closed after its ranks. Thread-safe."""
        with self._naming:
            self._writers = tuple(dict.fromkeys((*self._writers, *ranks)))
            for store in self.all:
                if isinstance(store, StoreClient):
                    store.name_writers(self._writers)

    def close(self) -> None:
        """Disconnect from all stores, and close the own one. Idempotent."""
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
                self._reachable_at.append(None)
            else:
                address = StoreAddress(network.host, config.port, self._secret)
                try:
                    service = StoreService.start(store, transports, address)
                except PortsExhausted as exc:
                    raise KVConfigError(
                        f"--kv-pool: port {config.port} on {network.host} is in use: stop the "
                        "process that uses it, or choose another port=..."
                    ) from exc
                undo.callback(service.close)
                self._reachable_at.append((network.advertise_host or network.host, service.port))
                logger.info("the store of this instance listens on port %d", service.port)
        user = store.open_user()
        undo.callback(user.close)
        return user


def _open_mooncake_store(
    config: KVPoolConfig, registry: Registry, undo: ExitStack
) -> MooncakeChunkStore:
    """Open a client of a Mooncake Store, and register its staging memory for this instance's
    ranks."""
    network = config.network
    store = MooncakeChunkStore(
        MooncakeStoreConfig(
            config.mooncake_store,
            host=network.advertise_host or network.host,
            segment_bytes=config.dram_bytes,
            staging_bytes=config.staging_bytes,
            metadata=config.metadata or NO_METADATA_SERVER,
            protocol=config.protocol,
            devices=",".join(config.devices),
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
    """Open the transports that reach this instance's host memory."""
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
        raise KVConfigError(
            f"--kv-pool: the store of this instance can't be made reachable: {exc}"
        ) from exc
