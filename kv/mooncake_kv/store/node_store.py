"""The node store of one host: a memory arena, SSDs, and the movement of chunks between them.

    store = NodeStore(NodeStoreConfig(dram_bytes=4 << 30))
    store.offer(transports)              # ranks of this and other processes reach the arena
    user = store.open_user()             # a ChunkStore

Other processes use it through ``store_service``. One lock guards all bookkeeping; no KV byte is
copied and no file is accessed while it is held.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypeVar

from mooncake_hal.negotiation import Transports
from mooncake_kv.kv_event_publisher import KVEventPublisher
from mooncake_kv.kv_events_config import KVEventsConfig
from mooncake_kv.store.arena_memory import ArenaMemory
from mooncake_kv.store.chunk_store import (
    DEFAULT_LEASE_S,
    ArenaInfo,
    Chunk,
    CopyTerms,
    PutRefusal,
    ReadHandle,
    Residence,
    StoreObserver,
    StoreStats,
    Tier,
    WriteHandle,
)
from mooncake_kv.store.chunk_table import ChunkTable, NoObserver, TableSettings
from mooncake_kv.store.eviction import DEFAULT_POLICY, make_policy
from mooncake_kv.store.residence_index import IndexObserver, ResidenceIndex
from mooncake_kv.store.ssd_config import SsdConfig
from mooncake_kv.store.ssd_tier import SsdTier
from mooncake_kv.store.store_events import StoreEventLog
from mooncake_kv.store.tier_moves import TierMoves

TIMER_S = 0.25
"""Seconds between checks for pins and SSD writes past their deadlines."""
MAX_UNSENT_BATCHES = 8
"""Upper bound of the batches of events about chunks found on SSDs at start that are queued for
publishing: about ten megabytes. The scan blocks while the queue is longer."""
PUBLISH_TIMEOUT_S = 5.0
"""Seconds that a scan waits for the publisher; past that, the publisher is considered dead and no
scan waits for it again."""
CHUNKS_PER_DROP = 256
"""Chunks that ``drop`` removes under one hold of the lock, which takes a few milliseconds."""
DROP_PAUSE_S = 0.001
"""Seconds between two such holds. Without a pause the same thread would take the lock again before
waiting threads wake up."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class NodeStoreConfig:
    """Configuration of a node store.

    Args:
        dram_bytes: size of the arena.
        policy: name of the eviction policy, a key of ``eviction.POLICIES``.
        quarantine_s: seconds before memory is reused after a reader missed its deadline or a
            writer died; longer for readers with a longer transfer timeout.
        quotas: upper bound of the memory in bytes, by tenant.
        ssd: the SSD tier; None for a store without one.
        load_timeout_s: seconds that a pin waits for SSD reads; chunks that are missing by then are
            misses.
        kv_events: where to publish what the tiers hold; None: not at all.
    """

    dram_bytes: int
    policy: str = DEFAULT_POLICY
    quarantine_s: float = 30.0
    quotas: Mapping[str, int] = field(default_factory=dict)
    ssd: SsdConfig | None = None
    load_timeout_s: float = 10.0
    kv_events: KVEventsConfig | None = None


class NodeStore:
    """One host's share of the KVCache pool, and the only authority on what it holds. Thread-safe.

    Args:
        config: size, policy, SSDs and timeouts.
        observer: notified of what the tiers hold. Replaced by the publisher where ``config`` says
            to publish KV events.
        clock: monotonic seconds, from any origin.

    Raises:
        KVConfigError: the host lacks the memory or a directory that the configuration asks for.
    """

    def __init__(
        self,
        config: NodeStoreConfig,
        *,
        observer: StoreObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = TableSettings(
            lambda: make_policy(config.policy), config.quarantine_s, config.quotas
        )
        settings.make_policy()  # a wrong name is an error now
        self.epoch = secrets.token_hex(8)
        self._clock = clock
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._timer: threading.Thread | None = None
        with ExitStack() as undo:
            self.memory = ArenaMemory(config.dram_bytes)
            undo.callback(self.memory.close)
            shared_index = ResidenceIndex(_capacity(config), self.epoch)
            undo.callback(shared_index.close)
            self._publisher = None
            self._is_publishing = True  # False once the publisher has timed out
            if config.kv_events is not None and config.kv_events.is_published:
                self._publisher = KVEventPublisher(config.kv_events)
                undo.callback(self._publisher.close)
                observer = StoreEventLog(self._publisher.publish)
            self._index_info = shared_index.info
            self._table = ChunkTable(
                config.dram_bytes, settings, IndexObserver(shared_index, observer or NoObserver())
            )
            self._moves = TierMoves(self._table, self._lock, clock, config.load_timeout_s)
            if config.ssd is not None:
                self._open_ssds(config.ssd)
            self._undo = undo.pop_all()
        self._endpoints: dict[str, bytes] = {}
        self.metrics_address: str | None = None
        """See ``ArenaInfo.metrics``; for clients that connect from now on."""
        self._last_user = 0
        self._is_draining = False
        self._is_closed = False

    def offer(self, transports: Transports) -> None:
        """Register the arena with transports, so that peers can reach it. The caller owns the
        transports and closes them before the store.

        Raises:
            TransportUnavailable: none of them can register host memory.
        """
        transports.register(self.memory.region)
        self._endpoints = dict(transports.addresses)

    @property
    def arena(self) -> ArenaInfo:
        """Where the arena is and how to reach it."""
        return ArenaInfo(
            self.epoch,
            self.memory.address,
            self.memory.nbytes,
            self._endpoints,
            self._index_info,
            None if self._publisher is None else self._publisher.endpoints,
            self.metrics_address,
        )

    def open_user(self) -> StoreUser:
        """Open access for one user: an instance in this process, or a session of another one."""
        with self._lock:
            self._last_user += 1
            return StoreUser(self, self._last_user)

    def drain(self) -> None:
        """Grant no more handles: pins are misses, and writes are refused as by a store that is
        gone, so that they are offered again. Handles in force stay valid."""
        with self._lock:
            self._is_draining = True

    def is_busy(self) -> bool:
        """Whether any chunk is being read or written, by users or on its way to an SSD."""
        stats = self.stats()
        return stats.num_pins + stats.num_staging > 0

    def close(self) -> None:
        """Release memory, files and threads. Close users and transports first. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._stop.set()
        if self._timer is not None:
            self._timer.join()
        if self._moves.tier is not None:
            self._moves.tier.close()
        self._time_out_pins(math.inf)
        self._undo.close()

    def chunks(self) -> dict[Tier, list[Chunk]]:
        """All chunks that can be read, by tier."""
        with self._lock:
            found = {Tier.DRAM: list(self._table.ready_chunks())}
        if self._moves.tier is not None:
            found[Tier.SSD] = self._moves.tier.chunks()
        return found

    def verify(self) -> tuple[int, int]:
        """Read and check every SSD record; see ``SsdTier.verify``."""
        return (0, 0) if self._moves.tier is None else self._moves.tier.verify()

    def check_integrity(self) -> None:
        with self._lock:
            self._table.check_integrity()

    # -- for StoreUser --------------------------------------------------------------------------

    def probe(self, keys: Sequence[bytes]) -> list[Residence]:
        with self._lock:
            found = self._table.probe(keys)
            if self._moves.tier is not None:
                found = [
                    Residence.SSD
                    if where is Residence.ABSENT and self._moves.is_available(key)
                    else where
                    for key, where in zip(keys, found, strict=True)
                ]
            stats = self._table.stats
            stats.num_probes += len(keys)
            stats.num_found += len(found) - found.count(Residence.ABSENT)
        return found

    def pin(
        self, keys: Sequence[bytes], user: int, lease_s: float, first_bytes: int | None = None
    ) -> Future[list[ReadHandle | None]]:
        with self._lock:
            if self._is_draining:
                self._table.stats.num_misses += len(keys)
                return done([None] * len(keys))
            now = self._clock()
            self._table.touch(keys, now)
            handles = self._table.pin(keys, user, lease_s, now)
            num_hits = len(handles) - handles.count(None)
            self._table.stats.num_dram_hits += num_hits
            self._moves.touched(keys)
            if num_hits == len(keys) or self._moves.tier is None or self._is_closed:
                self._table.stats.num_misses += len(keys) - num_hits
                return done(handles)
            future, begin = self._moves.load(keys, handles, user, lease_s, first_bytes)
        begin()
        return future

    def await_bytes(self, handles: Sequence[ReadHandle], beyond: int) -> Future[int]:
        with self._lock:
            return done(0) if self._is_closed else self._moves.await_bytes(handles, beyond)

    def release(self, handles: Sequence[ReadHandle], user: int) -> list[bool]:
        with self._lock:
            return self._table.release([h.handle_id for h in handles], user, self._clock())

    def reserve(
        self,
        chunks: Sequence[Chunk],
        user: int,
        lease_s: float,
        copy: CopyTerms | None = None,
        *,
        is_use: bool = True,
    ) -> list[WriteHandle | PutRefusal]:
        with self._lock:
            if self._is_draining:
                return [PutRefusal.UNREACHABLE] * len(chunks)
            now = self._clock()
            found = self._table.reserve(chunks, user, lease_s, now, copy, is_use=is_use)
            if is_use:
                self._moves.touched(chunk.key for chunk in chunks)
        return found

    def end_writes(
        self,
        handles: Sequence[WriteHandle],
        user: int,
        *,
        are_complete: bool,
        may_still_arrive: bool = False,
    ) -> list[bool]:
        ids = [handle.handle_id for handle in handles]
        with self._lock:
            now = self._clock()
            if not are_complete:
                return self._table.abort(ids, user, now, may_still_arrive=may_still_arrive)
            are_stored = self._table.commit(ids, user, now)
            self._moves.committed([handle.key for handle in handles])
            return are_stored

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._table.touch(keys, self._clock())
            self._moves.touched(keys)

    def drop(self, keys: Sequence[bytes]) -> int:
        """See ``ChunkStore.drop``. Blocks until all keys are dropped, and releases the lock in
        between so that other users make progress."""
        keys = list(dict.fromkeys(keys))
        num_gone = 0
        for start in range(0, len(keys), CHUNKS_PER_DROP):
            if start:
                time.sleep(DROP_PAUSE_S)
            num_gone += self._drop_some(keys[start : start + CHUNKS_PER_DROP])
        return num_gone

    def _drop_some(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            gone = {key for key in keys if self._table.entry(key) is not None}
            self._table.drop(keys, self._clock())
            self._moves.drop(keys)
            if self._moves.tier is not None:
                on_ssd = self._moves.tier.forget(keys)
                self._table.observer.removed(Tier.SSD, on_ssd)
                gone.update(on_ssd)
        return len(gone)

    def stats(self) -> StoreStats:
        with self._lock:
            self._table.expire(self._clock())
            stats = deepcopy(self._table.stats)
            self._table.fill_levels(stats)
        if self._moves.tier is not None:
            self._moves.tier.fill_stats(stats)
        return stats

    def set_transfer_timeout(self, user: int, timeout_s: float) -> None:
        with self._lock:
            self._table.set_transfer_timeout(user, timeout_s)

    def abandon_user(self, user: int) -> bool:
        with self._lock:
            finished = self._moves.end_user(user)
            has_writes = self._table.abandon_user(user, self._clock())
        for finish in finished:
            finish()
        return has_writes

    def resume_user(self, user: int, writing: Collection[int]) -> None:
        with self._lock:
            self._table.resume_user(user, writing, self._clock())

    def end_user(self, user: int, *, is_drained: bool) -> None:
        with self._lock:
            finished = self._moves.end_user(user)
            self._table.end_user(user, self._clock(), is_drained=is_drained)
        for finish in finished:
            finish()

    # -- SSDs -----------------------------------------------------------------------------------

    def _open_ssds(self, config: SsdConfig) -> None:
        tier = SsdTier(config, self.memory.view, self._clock, self._ssd_removed, self._ssd_found)
        self._moves.tier = tier
        tier.start()
        self._timer = threading.Thread(target=self._run_timer, name="store-timer", daemon=True)
        self._timer.start()

    def _ssd_found(self, chunks: Sequence[Chunk]) -> None:
        """Report chunks that were on SSDs before the start. Blocks the scan until the publisher has
        caught up: the events of millions of chunks are gigabytes."""
        with self._lock:  # chunks dropped since the scan found them have been reported as removed
            there = [chunk for chunk in chunks if self._moves.has(chunk.key)]
            self._table.observer.stored(Tier.SSD, there)
        if self._publisher is not None and self._is_publishing:
            self._is_publishing = self._publisher.await_sent(MAX_UNSENT_BATCHES, PUBLISH_TIMEOUT_S)

    def _ssd_removed(self, keys: Sequence[bytes]) -> None:
        with self._lock:  # chunks written again in the meantime have been reported as stored
            gone = [key for key in keys if not self._moves.has(key)]
            self._table.observer.removed(Tier.SSD, gone)

    def _run_timer(self) -> None:
        while not self._stop.wait(TIMER_S):
            self._time_out_pins(self._clock())
            if self._moves.tier is not None:
                self._moves.tier.cancel_hung_writes()

    def _time_out_pins(self, now: float) -> None:
        with self._lock:
            finished = self._moves.time_out(now)
        for finish in finished:
            finish()


class StoreUser:
    """``ChunkStore`` for a user in the store's own process; see ``NodeStore.open_user``."""

    def __init__(self, store: NodeStore, user: int) -> None:
        self._store = store
        self._user = user

    @property
    def arena(self) -> ArenaInfo:
        return self._store.arena

    def probe(self, keys: Sequence[bytes]) -> Future[list[Residence]]:
        return done(self._store.probe(keys))

    def pin(
        self,
        keys: Sequence[bytes],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        first_bytes: int | None = None,
    ) -> Future[list[ReadHandle | None]]:
        return self._store.pin(keys, self._user, lease_s, first_bytes)

    def await_bytes(self, handles: Sequence[ReadHandle], beyond: int) -> Future[int]:
        return self._store.await_bytes(handles, beyond)

    def release(self, handles: Sequence[ReadHandle]) -> Future[list[bool]]:
        return done(self._store.release(handles, self._user))

    def reserve(
        self,
        chunks: Sequence[Chunk],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        copy: CopyTerms | None = None,
        is_use: bool = True,
    ) -> Future[list[WriteHandle | PutRefusal]]:
        return done(self._store.reserve(chunks, self._user, lease_s, copy, is_use=is_use))

    def commit(self, handles: Sequence[WriteHandle]) -> Future[list[bool]]:
        return done(self._store.end_writes(handles, self._user, are_complete=True))

    def abort(
        self, handles: Sequence[WriteHandle], *, may_still_arrive: bool = False
    ) -> Future[list[bool]]:
        return done(
            self._store.end_writes(
                handles, self._user, are_complete=False, may_still_arrive=may_still_arrive
            )
        )

    def touch(self, keys: Sequence[bytes]) -> Future[None]:
        self._store.touch(keys)
        return done(None)

    def drop(self, keys: Sequence[bytes]) -> Future[int]:
        return done(self._store.drop(keys))

    def stats(self) -> Future[StoreStats | None]:
        return done(self._store.stats())

    def set_transfer_timeout(self, timeout_s: float) -> None:
        """Declare the upper bound of this user's transfers, in seconds."""
        self._store.set_transfer_timeout(self._user, timeout_s)

    def abandon(self) -> bool:
        """Handle the loss of this user's session: its reads end, and its unfinished writes keep
        their memory. Returns whether there are any; if so, ``resume`` or ``close`` must follow."""
        return self._store.abandon_user(self._user)

    def resume(self, writing: Collection[int]) -> None:
        """The user is connected again: free the memory of its writes, except of the handles in
        ``writing``, whose transfers are still in flight."""
        self._store.resume_user(self._user, writing)

    def close(self, *, is_drained: bool = True) -> None:
        """End this user and all of its handles.

        Args:
            is_drained: True if none of its transfers is in flight any more. Otherwise the memory
                that its read handles covered is quarantined before it is reused, as that of its
                write handles always is.
        """
        self._store.end_user(self._user, is_drained=is_drained)


def _capacity(config: NodeStoreConfig) -> int:
    """Bytes that all tiers together can hold."""
    directories = config.ssd.directories if config.ssd is not None else ()
    return config.dram_bytes + sum(each.capacity_bytes for each in directories)


def done(result: Result) -> Future[Result]:
    """A future that is already resolved."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future
