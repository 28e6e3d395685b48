"""A ``ChunkStore`` on top of Mooncake Store, used in place of a node store.

    store = MooncakeChunkStore(MooncakeStoreConfig(master="10.0.0.1:50051"))
    store.offer(transports)              # ranks reach staging memory as they do a store's arena

Written against mooncake-transfer-engine 0.3.13. Its client copies whole objects between segments
and registered memory, so chunks pass through staging memory here: a writer fills a slot, which
``commit`` puts as an object; ``pin`` gets an object into a slot, which the reader keeps until
``release``. A ``ChunkTable`` manages the slots, with its deadlines and its quarantine.

Differences from a node store: the master decides on eviction, replicas and leases; there are no
quotas, no KV events and no index in shared memory; a probe renews leases; ``CopyTerms`` are
ignored. If the master does not reply, calls end as misses after ``CALL_TIMEOUT_S``; from then on
all calls are misses at once, until it has replied to one that is made in the background. So a
frozen master costs its users one timeout, not one per request.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

from msgspec import structs

from mooncake_hal.negotiation import Transports
from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.arena_memory import ArenaMemory
from mooncake_kv.store.chunk_store import (
    DEFAULT_LEASE_S,
    ArenaInfo,
    Chunk,
    CopyTerms,
    PutRefusal,
    ReadHandle,
    Residence,
    StoreStats,
    WriteHandle,
)
from mooncake_kv.store.chunk_table import ChunkTable, TableSettings
from mooncake_kv.store.daemon_threads import DaemonThreads
from mooncake_kv.store.eviction import LRU

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

NUM_THREADS = 4
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 40.0
"""Longer than the client's own timeout of a message to the master, 30 s: a process that ends while
the client is in a call is aborted by it."""
MAX_WAITING = 1024
"""Upper bound of the calls that wait for the master; more are misses at once."""
TIMER_S = 0.25
USER = 1
NO_METADATA_SERVER = "P2PHANDSHAKE"
NO_KEY = bytes(16)
"""Looked up to see whether the master replies."""


@dataclass(frozen=True, slots=True)
class MooncakeStoreConfig:
    """Configuration of a Mooncake Store client.

    Args:
        master: HOST:PORT of ``mooncake_master``.
        host: address of this client, as its peers reach it.
        metadata: URL of the metadata server, or ``NO_METADATA_SERVER``.
        segment_bytes: memory that this host contributes to the pool; 0 for none.
        staging_bytes: memory for chunks in transit.
        protocol: ``tcp`` or ``rdma``.
        devices: comma-separated NICs for rdma; empty for all.
        quarantine_s: seconds before a slot is reused after its reader missed its deadline; at least
            the users' transfer timeout.
    """

    master: str
    host: str = "127.0.0.1"
    metadata: str = NO_METADATA_SERVER
    segment_bytes: int = 1 << 30
    staging_bytes: int = 256 << 20
    protocol: str = "tcp"
    devices: str = ""
    quarantine_s: float = 30.0


class MooncakeChunkStore:
    """``ChunkStore`` over a Mooncake Store.

    Args:
        config: the client's configuration.

    Raises:
        KVConfigError: the package is not installed, or the master can't be reached.
    """

    def __init__(self, config: MooncakeStoreConfig) -> None:
        package = _package()
        _require_master(config.master)
        self._memory = ArenaMemory(config.staging_bytes)
        self._table = ChunkTable(config.staging_bytes, TableSettings(LRU, config.quarantine_s))
        self._lock = threading.Lock()
        self._arena = ArenaInfo(secrets.token_hex(8), self._memory.address, self._memory.nbytes)
        self._staging: dict[bytes, int] = {}  # write handles, by key
        self._chunks: dict[int, Chunk] = {}  # the chunk in a slot, by handle
        self._waiting: dict[Future[Any], tuple[float, Any]] = {}
        self._is_hung = False  # a call has timed out, and the master has not replied since
        self._is_asking = False  # whether it does is being asked
        self._is_closed = False
        self._client = package.MooncakeDistributedStore()
        status = self._client.setup(
            config.host,
            config.metadata,
            config.segment_bytes,
            16 << 20,
            config.protocol,
            config.devices,
            config.master,
        ) or self._client.register_buffer(self._memory.address, self._memory.nbytes)
        if status:
            self._memory.close()
            raise KVConfigError(
                f"Mooncake Store rejects this client (status {status}): check that {config.host} "
                f"is an address of this host, and that {config.master} runs the client's version"
            )
        self._threads = _client_threads("mooncake-store", NUM_THREADS)
        self._stop = threading.Event()
        self._timer = threading.Thread(target=self._run_timer, name="mooncake-time", daemon=True)
        self._timer.start()

    def offer(self, transports: Transports) -> None:
        """Register the staging memory with transports, so that ranks can reach it. The caller owns
        the transports and closes them before the store.

        Raises:
            TransportUnavailable: none of them can register host memory.
        """
        transports.register(self._memory.region)
        self._arena = replace(self._arena, endpoints=dict(transports.addresses))

    @property
    def arena(self) -> ArenaInfo | None:
        return None if self._is_hung else self._arena

    def probe(self, keys: Sequence[bytes]) -> Future[list[Residence]]:
        return self._ask(lambda: self._probe(keys), [Residence.ABSENT] * len(keys))

    def pin(
        self,
        keys: Sequence[bytes],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        first_bytes: int | None = None,
    ) -> Future[list[ReadHandle | None]]:
        # ignores ``first_bytes``: all bytes are in memory when the future resolves
        miss: list[ReadHandle | None] = [None] * len(keys)
        return self._ask(lambda: self._load(keys, lease_s), miss, self._forget)

    def await_bytes(self, handles: Sequence[ReadHandle], beyond: int) -> Future[int]:
        return _done(min((handle.nbytes for handle in handles), default=0))

    def release(self, handles: Sequence[ReadHandle]) -> Future[list[bool]]:
        return _done([self._end_read(handle.handle_id) for handle in handles])

    def reserve(
        self,
        chunks: Sequence[Chunk],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        copy: CopyTerms | None = None,
        is_use: bool = True,
    ) -> Future[list[WriteHandle | PutRefusal]]:
        miss: list[WriteHandle | PutRefusal] = [PutRefusal.UNREACHABLE] * len(chunks)
        return self._ask(lambda: self._reserve(chunks, lease_s), miss, self._abort)

    def commit(self, handles: Sequence[WriteHandle]) -> Future[list[bool]]:
        return self._ask(
            lambda: self._put(handles),
            [False] * len(handles),
            refused=lambda: self._abort(handles),
        )

    def abort(
        self, handles: Sequence[WriteHandle], *, may_still_arrive: bool = False
    ) -> Future[list[bool]]:
        return _done(self._abort(handles, may_still_arrive=may_still_arrive))

    def touch(self, keys: Sequence[bytes]) -> Future[None]:
        def probe_keys() -> None:
            self._probe(keys)

        return self._ask(probe_keys, None)

    def drop(self, keys: Sequence[bytes]) -> Future[int]:
        return self._ask(lambda: sum(self._client.remove(_name(key), True) == 0 for key in keys), 0)

    def stats(self) -> Future[StoreStats | None]:
        """Counters of this client, and gauges of its staging memory."""
        with self._lock:
            self._table.expire(time.monotonic())
            found = replace(self._table.stats, num_evicted={})  # evicts slots, not chunks
            self._table.fill_levels(found)
        return _done(found)

    def close(self) -> None:
        """Wait up to CLOSE_TIMEOUT_S for calls in flight, and as long for the client to leave the
        pool. Idempotent.

        If it does not, because the master is frozen, its memory stays mapped until the process
        ends: the client may still write to it. While it leaves, the client holds the interpreter's
        lock, for up to a minute by its own timeouts, so that this may take longer.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._stop.set()
        self._timer.join()
        self._threads.cancel_queued()
        has_ended = _end(self._threads)
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future, (_, miss) in waiting.items():
            future.set_result(miss)
        if has_ended:
            leaving = _client_threads("mooncake-leave", 1)
            leaving.add([self._leave])
            has_ended = _end(leaving)
        if not has_ended:
            logger.warning(
                "the client of a Mooncake Store did not return within %g s: its memory stays in "
                "use until this process ends",
                CLOSE_TIMEOUT_S,
            )

    def _leave(self) -> None:
        self._client.unregister_buffer(self._memory.address)
        self._client.close()
        self._memory.close()

    # -- on the client's threads -----------------------------------------------------------------

    def _probe(self, keys: Sequence[bytes]) -> list[Residence]:
        found = self._client.batch_is_exist([_name(key) for key in keys]) if keys else []
        where = []
        for key, is_there in zip(keys, _each(found, keys), strict=True):
            away = Residence.STAGING if key in self._staging else Residence.ABSENT
            where.append(Residence.DRAM if is_there == 1 else away)
        return where

    def _reserve(self, chunks: Sequence[Chunk], lease_s: float) -> list[WriteHandle | PutRefusal]:
        there = self._client.batch_is_exist([_name(chunk.key) for chunk in chunks])
        grants: list[WriteHandle | PutRefusal] = []
        for chunk, is_there in zip(chunks, _each(there, chunks), strict=True):
            if is_there < 0:
                grants.append(PutRefusal.UNREACHABLE)
                continue
            with self._lock:
                holder = self._staging.get(chunk.key)
                now = time.monotonic()
                if is_there:
                    grants.append(PutRefusal.PRESENT)
                elif holder is not None and self._table.is_held(holder, USER, now):
                    grants.append(PutRefusal.STAGING)
                else:
                    grants.append(self._slot(chunk, lease_s, now))
        return grants

    def _slot(self, chunk: Chunk, lease_s: float, now: float) -> WriteHandle | PutRefusal:
        """Reserve staging memory under a random key: several slots may hold the same chunk."""
        slot = structs.replace(chunk, key=secrets.token_bytes(16), parent=None, tenant="")
        (grant,) = self._table.reserve([slot], USER, lease_s, now)
        if isinstance(grant, WriteHandle):
            self._staging[chunk.key] = grant.handle_id
            self._chunks[grant.handle_id] = structs.replace(chunk, key=slot.key)
            return structs.replace(grant, key=chunk.key)
        return grant

    def _put(self, handles: Sequence[WriteHandle]) -> list[bool]:
        with self._lock:
            now = time.monotonic()
            held = [
                h
                for h in handles
                if self._is_mine(h) and self._table.is_held(h.handle_id, USER, now)
            ]
        status: Sequence[int] = []
        try:
            if held:
                status = self._client.batch_put_from(
                    [_name(handle.key) for handle in held],
                    [self._memory.address + handle.offset for handle in held],
                    [handle.nbytes for handle in held],
                )
        finally:  # in any case, no copy is in flight any more
            put = {h.handle_id: s == 0 for h, s in zip(held, _each(status, held), strict=True)}
            ended = [self._end_write(h, put.get(h.handle_id, False)) for h in handles]
        return ended

    def _load(self, keys: Sequence[bytes], lease_s: float) -> list[ReadHandle | None]:
        sizes = [self._client.get_size(_name(key)) for key in keys]
        with self._lock:
            self._table.stats.num_misses += sum(nbytes <= 0 for nbytes in sizes)
        slots: list[WriteHandle | None] = []
        for key, nbytes in zip(keys, sizes, strict=True):
            slots.append(self._reserve_slot(key, nbytes, lease_s) if nbytes > 0 else None)
        wanted = [slot for slot in slots if slot is not None]
        status: Sequence[int] = []
        try:
            if wanted:
                status = self._client.batch_get_into(
                    [_name(slot.key) for slot in wanted],
                    [self._memory.address + slot.offset for slot in wanted],
                    [slot.nbytes for slot in wanted],
                )
        finally:  # in any case, no copy is in flight any more
            got = dict(zip((slot.handle_id for slot in wanted), _each(status, wanted), strict=True))
            handles = [
                None if slot is None else self._commit_slot(slot, got[slot.handle_id], lease_s)
                for slot in slots
            ]
        return handles

    def _reserve_slot(self, key: bytes, nbytes: int, lease_s: float) -> WriteHandle | None:
        slot = Chunk(secrets.token_bytes(16), None, 0, nbytes, 1)
        with self._lock:
            now = time.monotonic()
            (grant,) = self._table.reserve([slot], USER, CALL_TIMEOUT_S + lease_s, now)
            if not isinstance(grant, WriteHandle):
                return None
            self._chunks[grant.handle_id] = slot
        return structs.replace(grant, key=key)

    def _commit_slot(self, slot: WriteHandle, got: int, lease_s: float) -> ReadHandle | None:
        with self._lock:
            now, chunk = time.monotonic(), self._chunks.pop(slot.handle_id)
            stats = self._table.stats
            if got != slot.nbytes:
                self._table.abort([slot.handle_id], USER, now)
                stats.num_misses += 1
                return None
            self._table.commit([slot.handle_id], USER, now)
            (handle,) = self._table.pin([chunk.key], USER, lease_s, now)
            stats.num_puts -= 1  # the commit counted a slot, not a chunk
            stats.num_dram_hits += 1
            if handle is not None:
                self._chunks[handle.handle_id] = chunk
                return structs.replace(handle, key=slot.key)
        return None

    def _ask_master(self) -> None:
        """Look whether the master replies again; the timer asks until it does."""
        has_replied = False
        try:
            has_replied = _each(self._client.batch_is_exist([_name(NO_KEY)]), [NO_KEY])[0] >= 0
        finally:
            with self._lock:
                self._is_asking = False
                self._is_hung = not has_replied

    # -- inside ---------------------------------------------------------------------------------

    def _is_mine(self, handle: WriteHandle) -> bool:
        return self._staging.get(handle.key) == handle.handle_id

    def _end_write(
        self, handle: WriteHandle, is_put: bool, *, may_still_arrive: bool = False
    ) -> bool:
        """Free a writer's slot; returns whether its chunk was put, within the deadline."""
        with self._lock:
            now, chunk = time.monotonic(), self._chunks.pop(handle.handle_id, None)
            if chunk is None:
                return False
            if self._is_mine(handle):
                del self._staging[handle.key]
            if not is_put:
                ids = [handle.handle_id]
                self._table.abort(ids, USER, now, may_still_arrive=may_still_arrive)
                return False
            (in_time,) = self._table.commit([handle.handle_id], USER, now)
            self._table.drop([chunk.key], now)
        return in_time

    def _abort(
        self, grants: Sequence[WriteHandle | PutRefusal], *, may_still_arrive: bool = False
    ) -> list[bool]:
        ended = []
        for grant in grants:
            with self._lock:
                is_held = (
                    isinstance(grant, WriteHandle)
                    and self._is_mine(grant)
                    and self._table.is_held(grant.handle_id, USER, time.monotonic())
                )
            if isinstance(grant, WriteHandle):
                self._end_write(grant, False, may_still_arrive=may_still_arrive)
            ended.append(is_held)
        return ended

    def _end_read(self, handle_id: int) -> bool:
        with self._lock:
            now, chunk = time.monotonic(), self._chunks.pop(handle_id, None)
            if chunk is None:
                return False
            (is_valid,) = self._table.release([handle_id], USER, now)
            self._table.drop([chunk.key], now)
        return is_valid

    def _forget(self, handles: Sequence[ReadHandle | None]) -> None:
        """Release the handles of a pin that has timed out."""
        for handle in handles:
            if handle is not None:
                self._end_read(handle.handle_id)

    def _ask(
        self,
        call: Callable[[], Result],
        miss: Result,
        undo: Callable[[Result], object] = lambda _: None,
        refused: Callable[[], object] = lambda: None,
    ) -> Future[Result]:
        """Run a call of the client in the background.

        Args:
            call: blocks on the client; runs on a thread of the client.
            miss: the result if the call fails or times out.
            undo: called with a result that came after the timeout.
            refused: called if the call is not made, because the master hangs, or too many are
                waiting for it.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            is_refused = self._is_closed or self._is_hung or len(self._waiting) >= MAX_WAITING
            if not is_refused:
                self._waiting[future] = (time.monotonic() + CALL_TIMEOUT_S, miss)
        if is_refused:
            refused()
            future.set_result(miss)
            return future

        def run() -> None:
            with self._lock:
                is_late = future not in self._waiting
            if is_late:
                refused()
                return
            try:
                result = call()
            except Exception:  # thread top: a miss for this caller
                logger.exception("a call of Mooncake Store's client failed")
                result = miss
            with self._lock:
                is_late = self._waiting.pop(future, None) is None
            if is_late:
                undo(result)
            else:
                future.set_result(result)

        self._threads.add([run])
        return future

    def _run_timer(self) -> None:
        while not self._stop.wait(TIMER_S):
            now = time.monotonic()
            with self._lock:
                late = [(f, m) for f, (deadline, m) in self._waiting.items() if deadline <= now]
                for future, _ in late:
                    del self._waiting[future]
                self._is_hung = self._is_hung or bool(late)
                must_ask = self._is_hung and not self._is_asking
                self._is_asking = self._is_asking or must_ask
            if late:
                logger.warning(
                    "the master of a Mooncake Store did not reply within %g s: %d calls are "
                    "misses, as are all others until it replies",
                    CALL_TIMEOUT_S,
                    len(late),
                )
            if must_ask:
                self._threads.add([self._ask_master])
            for future, miss in late:
                future.set_result(miss)


def _client_threads(name: str, count: int) -> DaemonThreads[Callable[[], None]]:
    return DaemonThreads(name, count, lambda call: call())


def _end(threads: DaemonThreads[Callable[[], None]]) -> bool:
    threads.close()
    return threads.join(time.monotonic() + CLOSE_TIMEOUT_S)


def _package() -> ModuleType:
    try:
        import mooncake.store
    except ModuleNotFoundError as exc:
        if exc.name not in ("mooncake", "mooncake.store"):
            raise
        raise KVConfigError(
            "Mooncake Store needs its client: pip install mooncake-transfer-engine-non-cuda"
        ) from exc
    except ImportError as exc:
        raise KVConfigError(f"Mooncake Store's client does not import: {exc}") from exc
    package: ModuleType = mooncake.store
    return package


def _require_master(address: str) -> None:
    """Fail fast if no master listens: the client itself retries for a minute and a half."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as exc:
        raise KVConfigError(
            f"no `mooncake_master` replies at {address!r}, wanted HOST:PORT of one: {exc}"
        ) from exc


def _name(key: bytes) -> str:
    """The object name of a chunk; the prefix keeps it apart from other users of the pool."""
    return f"mooncake-kv/1/{key.hex()}"


def _each(status: Sequence[int], asked: Sequence[Any]) -> Sequence[int]:
    """One status per item. A batch call that fails as a whole returns a single status, or none."""
    return status if len(status) == len(asked) else [-1] * len(asked)


def _done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future
