"""A node store for other processes: sessions in front of one ``NodeStore``.

    service = StoreService.start(store, transports, StoreAddress("0.0.0.0", 7701, secret))

``mooncake-kv store`` runs one per host; engines connect to it with ``StoreClient``. One thread with
an asyncio loop handles all messages. KV bytes don't pass through it: the engines' ranks read and
write the arena themselves, with one-sided transfers.

A user whose session is lost (it did not send ``CloseSession``) may still have writes in flight, and
its process may be frozen in the middle of one. The store does not reuse the memory of these writes
until

* the user opens a new session and names the writes that are still in flight;
* or all processes that write for it have exited, which the kernel reports for those of this host;
* or, where some of them can't be observed from this host, ``UNSEEN_WRITERS_S`` have passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeout
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from msgspec.structs import replace

from mooncake_hal.errors import PeerLost, RequestRejected
from mooncake_hal.negotiation import Transports
from mooncake_hal.session.aio import AsyncListener, AsyncSession, listen
from mooncake_hal.session.processes import ProcessName, open_process
from mooncake_kv.errors import BadFrame, ConnectorDead, KVError
from mooncake_kv.io_loop import CLOSE_TIMEOUT_S, IoLoop
from mooncake_kv.store.chunk_store import Chunk, ReadHandle, Tier
from mooncake_kv.store.chunk_table import QUARANTINE_MARGIN_S
from mooncake_kv.store.node_store import NodeStore, StoreUser
from mooncake_kv.store.store_messages import (
    PAGE_CHUNKS,
    ArenaReply,
    Arrived,
    AwaitBytes,
    ChunkPage,
    CloseSession,
    CountReply,
    DropKeys,
    Ended,
    EndWrites,
    GetStats,
    ListChunks,
    OpenSession,
    Pending,
    PinKeys,
    Pinned,
    Poll,
    Probed,
    ProbeKeys,
    RegisterWriters,
    ReleaseHandles,
    ReserveChunks,
    Reserved,
    StatsReply,
    StoreReply,
    StoreRequest,
    TouchKeys,
    Verified,
    VerifyRecords,
    decode_request,
    encode_message,
    store_credentials,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

START_TIMEOUT_S = 30.0
SIGNAL_POLL_S = 0.5
"""How often ``wait`` wakes up so that Python can run signal handlers."""
DRAIN_POLL_S = 0.02
MAX_TICKETS = 1024
"""Upper bound of the pending replies that one user has not collected."""
ABANDONED_S = 60.0
"""Seconds without a poll after which a pending reply is dropped: its user has given up on it. Users
poll several times a second."""
MAX_OPERATIONS = 16
"""Upper bound of the operator requests of one user that run at the same time, each on a thread."""
UNSEEN_WRITERS_S = 600.0
"""Seconds before memory is reused whose writers can't be observed: processes on other hosts or in
other pid namespaces. A process that is frozen in the middle of a copy for longer than this, and
then resumes, may overwrite another chunk."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a store listens for sessions, and the secret that authenticates them.

    Args:
        host, port: address of the listener; port 0 lets the system choose a free port.
        secret: the deployment's secret.
    """

    host: str
    port: int
    secret: bytes = b""


class StoreService:
    """The server that gives other processes access to one store; created by ``start``.

    Args:
        store: the store to serve. The caller owns it and closes it after the service.
    """

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._failure: ConnectorDead | None = None
        # Not an Event: ``stop`` may run in a signal handler that interrupts ``wait`` while it holds
        # the Event's lock, and would deadlock. SimpleQueue.put is reentrant.
        self._stops: SimpleQueue[None] = SimpleQueue()
        self._users: dict[AsyncSession, _SessionUser] = {}
        self._clients: dict[bytes, _SessionUser] = {}  # by the client id of their ``OpenSession``
        self._departed: set[_SessionUser] = set()  # session lost, unfinished writes remain
        self._listener: AsyncListener | None = None
        self._loop = IoLoop("store-service", lambda *_: None, self._fail)

    @classmethod
    def start(cls, store: NodeStore, transports: Transports, address: StoreAddress) -> StoreService:
        """Register a store's memory with transports and start to listen.

        Args:
            store: the store to serve.
            transports: how peers reach the store's memory. The caller owns them and closes them
                after the service.
            address: where to listen.

        Raises:
            TransportUnavailable: no transport can register host memory.
            OSError, PortsExhausted: the host or port can't be bound.
        """
        store.offer(transports)
        service = cls(store)
        try:
            service._loop.run(service._listen(address), START_TIMEOUT_S)
        except BaseException:
            service.close()
            raise
        return service

    @property
    def port(self) -> int:
        """The TCP port of the listener."""
        assert self._listener is not None
        return self._listener.port

    def wait(self) -> None:
        """Block until ``stop`` is called or the service fails.

        Raises:
            ConnectorDead: the service's thread failed.
        """
        while True:  # with a timeout: a signal that another thread receives does not wake this one
            with contextlib.suppress(Empty):
                self._stops.get(timeout=SIGNAL_POLL_S)
                break
        if self._failure is not None:
            raise self._failure

    def drain(self, timeout_s: float) -> None:
        """Grant no more handles, and wait for those in force and for the writes queued for SSDs. Up
        to ``timeout_s`` seconds, or until ``stop`` is called."""
        self._store.drain()
        deadline = time.monotonic() + timeout_s
        while self._store.is_busy() and time.monotonic() < deadline:
            with contextlib.suppress(Empty):
                self._stops.get(timeout=DRAIN_POLL_S)
                return

    def stop(self) -> None:
        """Make ``wait`` return, or ``drain``. Safe to call from a signal handler."""
        self._stops.put(None)

    def close(self) -> None:
        """Close the listener and all sessions. Idempotent."""
        if self._listener is not None and self._loop.is_alive:
            with contextlib.suppress(FutureTimeout):  # a stuck loop ends with the process
                self._loop.run(self._close_sessions(self._listener), CLOSE_TIMEOUT_S)
        self._listener = None
        self._loop.close()
        for user in [*self._users.values(), *self._departed]:
            user.end()
        self._users.clear()
        self._clients.clear()
        self._departed.clear()

    async def _close_sessions(self, listener: AsyncListener) -> None:
        for session in list(listener.sessions):
            session.abort(PeerLost("the store is shutting down"))
        listener.close()
        await asyncio.sleep(0.01)  # lets asyncio close the sockets

    async def _listen(self, address: StoreAddress) -> None:
        credentials = store_credentials(address.secret)
        self._listener = await listen(address.host, [address.port], credentials, self._respond)

    def _fail(self, error: ConnectorDead) -> None:
        self._failure = error
        self._stops.put(None)

    def _respond(self, session: AsyncSession, payload: bytes) -> bytes:
        try:
            request = decode_request(payload)
        except BadFrame as exc:
            raise RequestRejected(str(exc)) from exc
        user = self._users.get(session)
        if user is None:
            user = self._users[session] = _SessionUser(self._store, session.peer_host)
            session.closed.add_done_callback(lambda _: self._on_session_closed(session))
        if isinstance(request, OpenSession):
            self._take_over(user, request)
        return encode_message(user.handle(request))

    def _take_over(self, user: _SessionUser, request: OpenSession) -> None:
        """Hand the state of a client's previous session over to its new one."""
        former = self._clients.get(request.client)
        if former is user:
            return
        if user.client:
            raise RequestRejected("another user has opened this session")
        self._clients[request.client] = user
        if former is None:
            return
        for session, other in list(self._users.items()):
            if other is former:  # its loss has not been noticed yet
                session.abort(PeerLost("the user has opened a new session"))
                self._on_session_closed(session)
        if former in self._departed:
            self._departed.discard(former)
            user.resume(former, request.writing)

    def _on_session_closed(self, session: AsyncSession) -> None:
        user = self._users.pop(session, None)
        if user is None:
            return
        if user.lose_session():
            self._departed.add(user)
            user.ending = self._loop.spawn(self._end_after_writers(user))
        else:
            self._end_user(user)

    async def _end_after_writers(self, user: _SessionUser) -> None:
        unseen_s = max(UNSEEN_WRITERS_S, user.transfer_timeout_s + QUARANTINE_MARGIN_S)
        await _await_exit(user.writers, unseen_s)
        self._end_user(user)

    def _end_user(self, user: _SessionUser) -> None:
        self._departed.discard(user)
        if self._clients.get(user.client) is user:
            del self._clients[user.client]
        user.end()


class _SessionUser:
    """The user behind one session: its handles, and its pending replies (tickets)."""

    def __init__(self, store: NodeStore, peer: str) -> None:
        self._store = store
        self._user: StoreUser = store.open_user()
        self._peer = peer
        self._name = "a user"
        self.client = b""
        self.writers: tuple[ProcessName, ...] = ()
        self.transfer_timeout_s = 0.0
        self.ending: asyncio.Task[None] | None = None
        self._is_drained = False
        self._operations: list[Future[Any]] = []
        self._tickets: dict[int, _Ticket] = {}
        self._last_ticket = 0
        self._listing: tuple[Tier, _Listing] | None = None
        """What the user is reading page by page."""

    def end(self) -> None:
        """End the user: its session is closed and none of its processes writes any more."""
        self._user.close(is_drained=self._is_drained)

    def lose_session(self) -> bool:
        """Handle the loss of the session; returns whether writes may still be in flight."""
        has_writes = not self._is_drained and self._user.abandon()
        if has_writes:
            logger.warning(
                "lost the session of %s at %s with writes in flight: their memory is not reused "
                "until its processes have exited or it has reconnected",
                self._name,
                self._peer,
            )
        return has_writes

    def resume(self, former: _SessionUser, writing: Sequence[int]) -> None:
        """Take over a departed user's handles.

        Args:
            former: the same client's user of its lost session.
            writing: ids of the write handles whose transfers are still in flight.
        """
        if former.ending is not None:
            former.ending.cancel()
        self._user.close()
        self._user = former._user
        self._user.resume(writing)

    def handle(self, request: StoreRequest) -> StoreReply:
        """Reply at once; slow requests get a ticket (``Pending``)."""
        reply = self._handle_transfer(request) or self._handle_session_or_operator(request)
        if reply is None:
            raise RequestRejected(f"the store does not support {type(request).__name__}")
        return reply

    def _handle_transfer(self, request: StoreRequest) -> StoreReply | None:
        """Handle the requests of an engine that loads and saves KV; None for other requests."""
        match request:
            case ProbeKeys(keys):
                return Probed(tuple(self._store.probe(keys)))
            case PinKeys(keys, lease_s, first_bytes):
                pinned = self._user.pin(keys, lease_s=lease_s, first_bytes=first_bytes)
                return self._when_done(pinned, _pinned)
            case AwaitBytes(handles, beyond):
                return self._when_done(self._user.await_bytes(handles, beyond), Arrived)
            case Poll(ticket):
                return self._collect(ticket)
            case ReleaseHandles(handles):
                return Ended(tuple(self._user.release(handles).result()))
            case ReserveChunks(chunks, lease_s, copy, is_use):
                granted = self._user.reserve(chunks, lease_s=lease_s, copy=copy, is_use=is_use)
                return Reserved(tuple(granted.result()))
            case EndWrites(handles, True):
                return Ended(tuple(self._user.commit(handles).result()))
            case EndWrites(handles, False, may_still_arrive):
                aborted = self._user.abort(handles, may_still_arrive=may_still_arrive)
                return Ended(tuple(aborted.result()))
            case TouchKeys(keys):
                self._store.touch(keys)
                return CountReply(len(keys))
        return None

    def _handle_session_or_operator(self, request: StoreRequest) -> StoreReply | None:
        """Handle session setup, teardown and operator commands; None for other requests."""
        match request:
            case OpenSession(name, client, transfer_timeout_s, writers):
                logger.info("%s at %s uses this store", name, self._peer)
                self._name, self.client, self.writers = name, client, writers
                self.transfer_timeout_s = transfer_timeout_s
                self._user.set_transfer_timeout(transfer_timeout_s)
                return ArenaReply(self._store.arena)
            case RegisterWriters(writers):
                self.writers = writers
                return CountReply(len(writers))
            case CloseSession():
                self._is_drained = True
                return CountReply(0)
            case GetStats():
                return StatsReply(self._store.stats())
            case ListChunks(tier, after):
                return self._operate(lambda: self._page(tier, after), ChunkPage)
            case DropKeys(keys, tenant):
                return self._operate(lambda: self._drop(keys, tenant), CountReply)
            case VerifyRecords():
                return self._operate(self._store.verify, lambda n: Verified(*n))
        return None

    def _page(self, tier: Tier, after: bytes) -> tuple[Chunk, ...]:
        """The PAGE_CHUNKS chunks of a tier with the smallest keys beyond ``after``, as of the first
        page. Their ``content`` is left out: a page with it might exceed a frame."""
        found = self._listing
        if found is None or found[0] is not tier or not after:
            found = tier, _Listing(self._store.chunks().get(tier, []))
        page = found[1].page(after)
        self._listing = None if len(page) < PAGE_CHUNKS else found
        return tuple(replace(chunk, content=None) for chunk in page)

    def _drop(self, keys: Sequence[bytes] | None, tenant: str | None) -> int:
        if keys is None:
            chunks = [c for found in self._store.chunks().values() for c in found]
            keys = [c.key for c in chunks if tenant in (None, c.tenant)]
        return self._store.drop(keys)

    def _operate(
        self, call: Callable[[], Result], make: Callable[[Result], StoreReply]
    ) -> StoreReply:
        self._operations = [each for each in self._operations if not each.done()]
        if len(self._operations) >= MAX_OPERATIONS:
            raise RequestRejected(f"{MAX_OPERATIONS} requests of this user are being executed")
        future = _on_a_thread(call)
        self._operations.append(future)
        return self._when_done(future, make)

    def _when_done(
        self, future: Future[Result], make: Callable[[Result], StoreReply]
    ) -> StoreReply:
        def resolve() -> StoreReply:
            try:
                return make(future.result())
            except (OSError, KVError) as exc:
                raise RequestRejected(f"the store failed to execute the request: {exc}") from exc

        if future.done():
            return resolve()
        now = time.monotonic()
        for number, ticket in list(self._tickets.items()):  # the longest without a poll first
            if now - ticket.polled_at < ABANDONED_S:
                break
            del self._tickets[number]
        if len(self._tickets) >= MAX_TICKETS:
            raise RequestRejected(
                f"too many pending replies: {MAX_TICKETS} have not been collected"
            )
        self._last_ticket += 1
        self._tickets[self._last_ticket] = _Ticket(future.done, resolve, now)
        return Pending(self._last_ticket)

    def _collect(self, number: int) -> StoreReply:
        ticket = self._tickets.pop(number, None)
        if ticket is None:
            raise RequestRejected(f"no pending reply has ticket {number}")
        if not ticket.is_done():
            ticket.polled_at = time.monotonic()
            self._tickets[number] = ticket
            return Pending(number)
        return ticket.resolve()


@dataclass(slots=True)
class _Ticket:
    """A pending reply, which the client collects later; ``resolve`` may raise a refusal."""

    is_done: Callable[[], bool]
    resolve: Callable[[], StoreReply]
    polled_at: float


async def _await_exit(writers: Sequence[ProcessName], unseen_s: float) -> None:
    """Wait until processes have exited, and at least ``unseen_s`` if some can't be observed."""
    loop, descriptors = asyncio.get_running_loop(), []
    are_seen = bool(writers)
    try:
        for process in writers:
            try:
                descriptor = open_process(process)
            except OSError as exc:
                logger.debug("the exit of a writer process can't be observed: %s", exc)
                are_seen = False
            else:
                descriptors += [] if descriptor is None else [descriptor]
        if not are_seen:
            await asyncio.sleep(unseen_s)
        for descriptor in descriptors:
            has_ended = asyncio.Event()
            loop.add_reader(descriptor, has_ended.set)
            try:
                await has_ended.wait()
            finally:
                loop.remove_reader(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _pinned(handles: list[ReadHandle | None]) -> StoreReply:
    return Pinned(tuple(handles))


class _Listing:
    """Chunks of one moment, to be read in pages in the order of their keys.

    They are divided by the first byte of their keys, which are hashes, and sorted part by part: one
    sort of millions of keys would keep every other thread waiting for seconds.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._parts: list[list[Chunk]] = [[] for _ in range(256)]
        for chunk in chunks:
            self._parts[chunk.key[0]].append(chunk)

    def page(self, after: bytes) -> list[Chunk]:
        """The PAGE_CHUNKS chunks with the smallest keys beyond ``after``, or all that there are."""
        found: list[Chunk] = []
        for number in range(after[0] if after else 0, len(self._parts)):
            part = self._parts[number] = sorted(self._parts[number], key=_key_of)
            start = bisect_right(part, after, key=_key_of)
            found += part[start : start + PAGE_CHUNKS - len(found)]
            if len(found) == PAGE_CHUNKS:
                break
        return found


def _key_of(chunk: Chunk) -> bytes:
    return chunk.key


def _on_a_thread(call: Callable[[], Result]) -> Future[Result]:
    """Run a blocking call on a thread of its own."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # noqa: BLE001  # thread top: the future carries it
            future.set_exception(exc)

    threading.Thread(target=run, name="store-operator", daemon=True).start()
    return future
