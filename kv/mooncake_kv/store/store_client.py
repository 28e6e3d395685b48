"""``StoreClient``: a ``ChunkStore`` whose store is in another process. All failures become misses.

When a store does not reply in time, the client drops the session and reconnects in the background.
Until it is connected again, every call is a miss without delay. So a store that is frozen, dead or
restarting costs its users one timeout, not one per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, TimeoutError as FutureTimeout
from typing import Any, TypeVar

from mooncake_hal.errors import (
    AccessDenied,
    PeerLost,
    RequestNotSent,
    RequestRejected,
    TransferError,
    VersionMismatch,
)
from mooncake_hal.session.aio import AsyncSession, connect
from mooncake_hal.session.connection_limits import LIMITS
from mooncake_hal.session.processes import ProcessName, this_process
from mooncake_hal.timing import timeout
from mooncake_kv.errors import BadFrame, ConnectorDead
from mooncake_kv.io_loop import CLOSE_TIMEOUT_S, IoLoop
from mooncake_kv.store.chunk_store import (
    DEFAULT_LEASE_S,
    ArenaInfo,
    Chunk,
    CopyTerms,
    PutRefusal,
    ReadHandle,
    Residence,
    StoreStats,
    Tier,
    WriteHandle,
)
from mooncake_kv.store.residence_index import ResidenceView
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
    StoreMessage,
    StoreReply,
    StoreRequest,
    TouchKeys,
    Verified,
    VerifyRecords,
    decode_reply,
    encode_message,
    store_credentials,
)
from mooncake_kv.store.store_service import StoreAddress

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Reply = TypeVar("Reply", bound=StoreMessage)

REQUEST_TIMEOUT_S = 2.0
PIN_TIMEOUT_S = 15.0
"""Longer than a store's own timeout for SSD reads, ``NodeStoreConfig.load_timeout_s``."""
OPERATOR_TIMEOUT_S = 600.0
"""Timeout of requests that iterate over all chunks."""
VERIFY_TIMEOUT_S = 24 * 3600.0
CONNECT_TIMEOUT_S = 5.0
RECONNECT_PAUSE_S = 0.2
REFUSED_PAUSE_S = 5.0
"""Seconds between attempts to connect to a store that rejects this client. It logs each of them."""
FIRST_POLL_S, LAST_POLL_S = 0.001, 0.02

_ENDS = (ReleaseHandles, EndWrites, Poll)
_REFUSALS = (AccessDenied, VersionMismatch, RequestRejected)
"""Why a store that can be reached does not accept a client."""


class StoreClient:
    """A ``ChunkStore`` over a session with a ``StoreService``.

    Args:
        address: the store's address.
        name: name of this user in the store's log.
        transfer_timeout_s: upper bound in seconds of any transfer to or from the store.
    """

    def __init__(
        self, address: StoreAddress, name: str = "user", *, transfer_timeout_s: float = 30.0
    ) -> None:
        self._address = address
        self._name = name
        self._client = secrets.token_bytes(16)
        self._transfer_timeout_s = transfer_timeout_s
        self._writers: tuple[ProcessName, ...] = (this_process(),)
        self._writing: set[int] = set()  # write handles that have not ended
        self._ended: list[WriteHandle] = []  # writes that have ended since the last OpenSession
        self._refusal = ""
        self._last_error: TransferError | BadFrame | None = None
        self._session: AsyncSession | None = None
        self._turns = asyncio.Semaphore(LIMITS.outstanding)
        self._arena: ArenaInfo | None = None
        self._index: ResidenceView | None = None
        self._answered = threading.Event()  # the store has accepted or rejected this client
        self._is_closed = False  # no more requests: the client has failed or is closed
        self._has_left = False
        self._lock = threading.Lock()  # no call becomes pending once ``_is_closed`` is set
        self._misses: dict[Future[Any], Any] = {}  # pending futures, and what a miss sets them to
        self._loop = IoLoop("store-client", lambda *_: None, self._failed)
        self._loop.call("", lambda: self._loop.spawn_housekeeping(self._stay_connected()))

    @property
    def arena(self) -> ArenaInfo | None:
        return self._arena

    @property
    def last_error(self) -> TransferError | BadFrame | None:
        """Why the store is not connected, as far as known; None while it is."""
        return self._last_error

    @property
    def is_refused(self) -> bool:
        """Whether the store can be reached, but rejects this client: another secret or version."""
        return isinstance(self._last_error, _REFUSALS)

    def await_store(self, timeout: float) -> bool:
        """Block until the store is connected; False if it rejects this client, or after ``timeout``
        seconds."""
        self._answered.wait(timeout)
        return self._session is not None

    def name_writers(self, writers: Sequence[ProcessName]) -> None:
        """Declare all processes that write to this client's handles; call it before the first
        write. The default is this process. If the session is lost, the store does not reuse the
        memory of unfinished writes before these processes have exited."""
        self._writers = tuple(writers)
        self._ask(RegisterWriters(self._writers), CountReply, lambda _: None, None)

    def probe(self, keys: Sequence[bytes]) -> Future[list[Residence]]:
        index = self._index
        found = index.probe(keys) if index is not None and keys else None
        if found is not None:
            future: Future[list[Residence]] = Future()
            future.set_result(found)
            return future
        miss = [Residence.ABSENT] * len(keys)
        return self._ask(
            ProbeKeys(tuple(keys)), Probed, lambda reply: _each(reply.found, keys), miss
        )

    def pin(
        self,
        keys: Sequence[bytes],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        first_bytes: int | None = None,
    ) -> Future[list[ReadHandle | None]]:
        miss: list[ReadHandle | None] = [None] * len(keys)
        request = PinKeys(tuple(keys), lease_s, first_bytes)
        return self._ask(
            request, Pinned, lambda reply: _each(reply.handles, keys), miss, PIN_TIMEOUT_S
        )

    def await_bytes(self, handles: Sequence[ReadHandle], beyond: int) -> Future[int]:
        request = AwaitBytes(tuple(handles), beyond)
        return self._ask(request, Arrived, lambda reply: reply.num_bytes, 0, PIN_TIMEOUT_S)

    def release(self, handles: Sequence[ReadHandle]) -> Future[list[bool]]:
        return self._end(ReleaseHandles(tuple(handles)), handles)

    def reserve(
        self,
        chunks: Sequence[Chunk],
        *,
        lease_s: float = DEFAULT_LEASE_S,
        copy: CopyTerms | None = None,
        is_use: bool = True,
    ) -> Future[list[WriteHandle | PutRefusal]]:
        miss: list[WriteHandle | PutRefusal] = [PutRefusal.UNREACHABLE] * len(chunks)
        request = ReserveChunks(tuple(chunks), lease_s, copy, is_use)
        return self._ask(request, Reserved, lambda reply: self._granted(reply, chunks), miss)

    def commit(self, handles: Sequence[WriteHandle]) -> Future[list[bool]]:
        return self._end_writes(EndWrites(tuple(handles), True))

    def abort(
        self, handles: Sequence[WriteHandle], *, may_still_arrive: bool = False
    ) -> Future[list[bool]]:
        return self._end_writes(EndWrites(tuple(handles), False, may_still_arrive))

    def touch(self, keys: Sequence[bytes]) -> Future[None]:
        return self._ask(TouchKeys(tuple(keys)), CountReply, lambda _: None, None)

    def drop(self, keys: Sequence[bytes]) -> Future[int]:
        request = DropKeys(tuple(keys))
        return self._ask(request, CountReply, lambda reply: reply.num_chunks, 0, OPERATOR_TIMEOUT_S)

    def drop_matching(
        self, *, keys: Sequence[bytes] | None = None, tenant: str | None = None
    ) -> Future[int | None]:
        """Drop the chunks with these keys, else all of a tenant, else all; returns how many there
        were, or None if the store can't be reached."""
        request = DropKeys(None if keys is None else tuple(keys), tenant)
        return self._ask(
            request, CountReply, lambda reply: reply.num_chunks, None, OPERATOR_TIMEOUT_S
        )

    def stats(self) -> Future[StoreStats | None]:
        return self._ask(GetStats(), StatsReply, lambda reply: reply.stats, None)

    def list_page(self, tier: Tier, after: bytes) -> Future[list[Chunk] | None]:
        """Up to PAGE_CHUNKS chunks of a tier with the smallest keys beyond ``after``; None if the
        store can't be reached."""
        request = ListChunks(tier, after)
        return self._ask(
            request, ChunkPage, lambda reply: list(reply.chunks), None, OPERATOR_TIMEOUT_S
        )

    def list_chunks(self, tier: Tier) -> list[Chunk] | None:
        """All chunks of a tier; None if the store can't be reached. Blocks."""
        found: list[Chunk] = []
        while True:
            page = self.list_page(tier, found[-1].key if found else b"").result()
            if page is None:
                return None
            found += page
            if len(page) < PAGE_CHUNKS:
                return found

    def verify(self) -> Future[tuple[int, int] | None]:
        """See ``NodeStore.verify``; None if the store can't be reached."""
        return self._ask(
            VerifyRecords(),
            Verified,
            lambda reply: (reply.num_intact, reply.num_damaged),
            None,
            VERIFY_TIMEOUT_S,
        )

    def close(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        try:
            if self._session is not None:
                with contextlib.suppress(FutureTimeout):  # the loop is stuck
                    self._ask(CloseSession(), CountReply, lambda _: None, None).result(
                        CLOSE_TIMEOUT_S
                    )
        finally:
            has_failed = self._is_closed
            self._end_calls()
            if not has_failed:
                with contextlib.suppress(FutureTimeout):
                    self._loop.run(self._close_session(), CLOSE_TIMEOUT_S)
            self._loop.close()

    # -- inside ---------------------------------------------------------------------------------

    def _granted(self, reply: Reserved, chunks: Sequence[Chunk]) -> list[WriteHandle | PutRefusal]:
        grants = _each(reply.grants, chunks)
        self._writing.update(each.handle_id for each in grants if isinstance(each, WriteHandle))
        return grants

    def _end_writes(self, request: EndWrites) -> Future[list[bool]]:
        self._writing.difference_update(handle.handle_id for handle in request.handles)
        return self._end(request, request.handles)

    def _end(self, request: StoreRequest, handles: Sequence[object]) -> Future[list[bool]]:
        miss = [False] * len(handles)
        return self._ask(request, Ended, lambda reply: _each(reply.valid, handles), miss)

    def _ask(
        self,
        request: StoreRequest,
        kind: type[Reply],
        read: Callable[[Reply], Result],
        miss: Result,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Future[Result]:
        """Send a request in the background.

        Args:
            request: the request.
            kind: type of its reply; any other reply is a miss.
            read: turns the reply into the result.
            miss: the result if there is no reply.
            timeout_s: seconds to poll for a reply that is not ready.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            is_miss = self._session is None or self._is_closed
            if not is_miss:
                self._misses[future] = miss
            elif isinstance(request, EndWrites):
                self._ended += request.handles
        if is_miss:
            future.set_result(miss)
            return future

        async def run() -> None:
            result = miss
            try:
                reply = await self._reply_to(request, timeout_s)
                if isinstance(reply, kind):
                    result = read(reply)
            except (TransferError, BadFrame) as exc:
                logger.debug("a store request failed: %s: %s", type(request).__name__, exc)
            finally:
                self._resolve(future, result)

        # A loop that ends meanwhile drops the task, maybe before its first line: then, as whenever
        # no more calls are accepted, ``_end_calls`` resolves the future.
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call("", lambda: self._spawn(run()))
        return future

    def _resolve(self, future: Future[Result], result: Result) -> None:
        with self._lock:
            is_pending = self._misses.pop(future, self) is not self
        if is_pending:
            future.set_result(result)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop.spawn(coroutine)

    async def _reply_to(self, request: StoreRequest, timeout_s: float) -> StoreReply:
        reply = await self._request(request)
        deadline, pause = time.monotonic() + timeout_s, FIRST_POLL_S
        while isinstance(reply, Pending) and time.monotonic() < deadline:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_POLL_S)
            reply = await self._request(Poll(reply.ticket))
        return reply

    async def _request(self, request: StoreRequest) -> StoreReply:
        session = self._session
        if session is None:
            raise TransferError("the store is not connected")
        await self._take_turn(request)
        try:
            payload = await session.request(encode_message(request), timeout=REQUEST_TIMEOUT_S)
        except (RequestRejected, RequestNotSent):
            raise
        except TransferError as exc:
            # The store may or may not have processed the request. Ending the session ends all of
            # its handles, so that both sides agree again.
            self._lost(session, exc)
            raise
        finally:
            self._turns.release()
        return decode_reply(payload)

    async def _take_turn(self, request: StoreRequest) -> None:
        """Wait until the session has a slot for one more request. Requests that end handles in the
        store wait without a timeout, since the store would keep their memory otherwise.

        Raises:
            RequestNotSent: no slot was free within REQUEST_TIMEOUT_S.
        """
        if not self._turns.locked():  # a slot is free: no timer needed
            await self._turns.acquire()
            return
        limit_s = None if isinstance(request, _ENDS) else REQUEST_TIMEOUT_S
        try:
            async with timeout(limit_s):
                await self._turns.acquire()
        except asyncio.TimeoutError:
            raise RequestNotSent(
                f"the session had no free slot within {REQUEST_TIMEOUT_S:g} s: "
                f"{LIMITS.outstanding} requests are outstanding"
            ) from None

    async def _stay_connected(self) -> None:
        while True:
            session = await self._connect()
            if session is not None:
                try:
                    await asyncio.wait({session.closed})
                except asyncio.CancelledError:  # ``close`` did not see this session yet
                    session.abort(PeerLost("the client was closed"))
                    raise
                self._lost(session, session.closed.result())
            await asyncio.sleep(REFUSED_PAUSE_S if self.is_refused else RECONNECT_PAUSE_S)

    async def _connect(self) -> AsyncSession | None:
        address = self._address
        credentials = store_credentials(address.secret)
        session, writers = None, self._writers
        try:
            session = await connect(
                address.host, address.port, credentials, timeout=CONNECT_TIMEOUT_S
            )
            arena = await self._open_session(session)
        except (TransferError, BadFrame) as exc:
            self._note_failure(exc)
            if session is not None:
                session.close("OpenSession failed")
            return None
        except asyncio.CancelledError:
            if session is not None:
                session.abort(PeerLost("the client was closed"))
            raise
        self._index = ResidenceView.open(arena.index, arena.epoch) if arena.index else None
        with self._lock:
            self._arena, self._session = arena, session
            ended = tuple(self._ended)
        if ended:  # OpenSession may have named them as in flight: the store would keep their memory
            self._ask(EndWrites(ended, False, True), Ended, lambda _: None, None)
        self._last_error, self._refusal = None, ""
        if self._writers is not writers:  # ``name_writers`` was called while disconnected
            self._ask(RegisterWriters(self._writers), CountReply, lambda _: None, None)
        self._answered.set()
        logger.info("connected to the store at %s port %d", address.host, address.port)
        return session

    def _note_failure(self, error: TransferError | BadFrame) -> None:
        """An attempt to connect has failed. A rejection is logged once, until it is another one."""
        self._last_error = error
        host, port = self._address.host, self._address.port
        if not self.is_refused:
            self._answered.clear()
            logger.debug("can't connect to the store at %s port %d: %s", host, port, error)
            return
        self._answered.set()
        if str(error) != self._refusal:
            self._refusal = str(error)
            logger.warning("the store at %s port %d rejects this client: %s", host, port, error)

    async def _open_session(self, session: AsyncSession) -> ArenaInfo:
        """Register this user, and name the writes of a former session that are still in flight.

        Raises:
            TransferError, BadFrame: the store does not accept this user.
        """
        self._ended.clear()
        request = OpenSession(
            self._name,
            self._client,
            self._transfer_timeout_s,
            self._writers,
            tuple(self._writing),
        )
        payload = await session.request(encode_message(request), timeout=REQUEST_TIMEOUT_S)
        reply = decode_reply(payload)
        if not isinstance(reply, ArenaReply):
            raise BadFrame(f"wanted ArenaReply from the store, got {type(reply).__name__}")
        return reply.arena

    async def _close_session(self) -> None:
        if self._session is not None:
            self._session.abort(PeerLost("the client was closed"))
            await asyncio.sleep(0.01)  # lets asyncio close the socket

    def _lost(self, session: AsyncSession, error: TransferError) -> None:
        session.abort(error)
        if self._session is session:
            self._session, self._arena, self._index = None, None, None
            self._last_error = error
            self._answered.clear()
            if not self._is_closed:
                logger.warning(
                    "lost the connection to the store at %s port %d, all its chunks are misses "
                    "until it is restored: %s",
                    self._address.host,
                    self._address.port,
                    error,
                )

    def _failed(self, error: ConnectorDead) -> None:
        logger.error("a store client failed, all its calls are misses from now on", exc_info=error)
        self._is_closed = True
        if self._session is not None:
            self._lost(self._session, PeerLost("the client failed"))
        self._end_calls()

    def _end_calls(self) -> None:
        """Accept no more calls, and resolve all pending ones as misses."""
        with self._lock:
            self._is_closed = True
            pending, self._misses = self._misses, {}
        for future, miss in pending.items():
            future.set_result(miss)


def _each(results: Sequence[Result], asked: Sequence[object]) -> list[Result]:
    """One result per item.

    Raises:
        BadFrame: the reply has another number of them.
    """
    if len(results) != len(asked):
        raise BadFrame(f"a store replied with {len(results)} results for {len(asked)} items")
    return list(results)
