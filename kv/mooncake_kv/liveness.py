"""Keepalives to peers that hold KV or reservations for us, and status inquiries to peers that have
fallen silent."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mooncake_hal.session.listener import tune
from mooncake_hal.timing import timeout
from mooncake_kv.addresses import is_own_address
from mooncake_kv.errors import (
    HandshakeRefused,
    KVTransferError,
    PeerAbsent,
    PeerGone,
    PeerUnreachable,
)
from mooncake_kv.io_loop import Spawn
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import PeerAddress, PeerTable
from mooncake_kv.protocol import StatusReply, StatusRequest

logger = logging.getLogger(__name__)

KEEPALIVES_PER_LEASE = 6
MAX_PUSH_INTERVAL_S = 1.0
"""Maximum interval between the keepalives of an instance that pushes, however long the leases."""

MIN_INTERVAL_S = 0.02
"""Minimum interval between keepalives, however short our lease."""

MIN_PEER_LEASE_S = 0.5
"""Leases of peers count as at least this long, because a request may name any."""


class HasRemote(Protocol):
    """An item for which keepalives are sent: KV that a peer holds for us, or waits for."""

    @property
    def remote(self) -> RemoteKV:
        """The KV, and the peer's address."""
        ...


Item = TypeVar("Item", bound=HasRemote)
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class KeepaliveInterval:
    """The rule for the interval between keepalives.

    Args:
        lease_s: this instance's own lease, in seconds.
        max_s: maximum interval, however long the leases, in seconds.
    """

    lease_s: float
    max_s: float = float("inf")

    def of(self, remotes: Iterable[RemoteKV]) -> float:
        """The interval in seconds: a sixth of the shortest lease among these peers and ours."""
        leases = (
            max(remote.lease_s, MIN_PEER_LEASE_S)
            for remote in remotes
            if remote.lease_s is not None
        )
        shortest_s = min((self.lease_s, *leases))
        return max(min(shortest_s / KEEPALIVES_PER_LEASE, self.max_s), MIN_INTERVAL_S)


class Keepalive(Generic[Item]):
    """Sends each peer one keepalive per interval of its own; a silent peer does not delay the
    others. Loop thread only.

    Args:
        interval: the rule for the interval.
        send: sends a peer one keepalive for items by request id, with a timeout in seconds.
        spawn: runs a task on the loop.
        has_stalled: returns whether the engine has stopped stepping; suspends the keepalives.
    """

    def __init__(
        self,
        interval: KeepaliveInterval,
        send: Callable[[dict[str, Item], float], Awaitable[None]],
        spawn: Spawn,
        has_stalled: Callable[[], bool],
    ) -> None:
        self._interval = interval
        self._send = send
        self._spawn = spawn
        self._has_stalled = has_stalled
        self._was_stalled = False
        self._in_flight: set[_Key] = set()
        self._sent_at: dict[_Key, float] = {}
        self._pause_s = 0.0
        self._interval_shortened = asyncio.Event()

    def wake_for(self, remote: RemoteKV) -> None:
        """Account for a new peer: wake up early if its lease requires a shorter interval."""
        if self._interval.of([remote]) < self._pause_s:
            self._interval_shortened.set()

    async def run(self, items: Callable[[], Mapping[str, Item]]) -> None:
        """Send every peer keepalives for its items, periodically, until cancelled.

        Args:
            items: returns the current items, by request id.
        """
        while True:
            await self._pause(items)
            if self._is_suspended():
                continue
            by_peer: defaultdict[_Key, dict[str, Item]] = defaultdict(dict)
            for request_id, item in items().items():
                remote = item.remote
                by_peer[remote.engine_id, remote.host, remote.port][request_id] = item
            self._send_due(by_peer)

    def _send_due(self, by_peer: Mapping[_Key, dict[str, Item]]) -> None:
        """Send to the peers whose interval ends before the next call, which the shortest interval
        of all peers determines."""
        now = asyncio.get_running_loop().time()
        intervals = {key: self._interval_of(group) for key, group in by_peer.items()}
        next_at = now + min(intervals.values(), default=0.0)
        self._sent_at = {key: at for key, at in self._sent_at.items() if key in by_peer}
        for key, group in by_peer.items():
            sent_at = self._sent_at.get(key)
            is_due = sent_at is None or next_at > sent_at + intervals[key]
            if is_due and key not in self._in_flight:
                self._sent_at[key] = now
                self._in_flight.add(key)
                self._spawn(self._send_one(key, group))

    def _is_suspended(self) -> bool:
        """Whether to let peers consider this instance dead, because a step of the engine hangs:
        they would otherwise hold KV for it for as long as the step does."""
        was_stalled, self._was_stalled = self._was_stalled, self._has_stalled()
        if self._was_stalled and not was_stalled:
            logger.error("the engine has stalled: keepalives to peers are suspended")
        return self._was_stalled

    async def _send_one(self, key: _Key, group: dict[str, Item]) -> None:
        try:
            await self._send(group, self._interval_of(group))
        finally:
            self._in_flight.discard(key)

    async def _pause(self, items: Callable[[], Mapping[str, Item]]) -> None:
        """Wait until the next keepalive is due; a new peer with a shorter lease shortens the
        wait."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._pause_s = self._interval_of(items())
        while (left_s := began + self._pause_s - loop.time()) > 0:
            self._interval_shortened.clear()
            with suppress(asyncio.TimeoutError):
                async with timeout(left_s):
                    await self._interval_shortened.wait()
            self._pause_s = min(self._pause_s, self._interval_of(items()))

    def _interval_of(self, items: Mapping[str, Item]) -> float:
        return self._interval.of(item.remote for item in items.values())


CONNECT_TIMEOUT_S = 2.0

_LOCAL_SHORTAGES = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EADDRNOTAVAIL,
)
"""Errors of connecting that are caused by a shortage on this host, so that they prove nothing about
the peer."""


class _IdleConnection(asyncio.BaseProtocol):
    """An idle TCP connection, whose keepalives let the kernel detect that the peer's host died."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        with suppress(OSError):  # closed already, which connection_lost reports next
            tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        pass  # the peer's greeting

    def eof_received(self) -> None:
        pass  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.closed.set()
        if self._transport is not None:
            self._transport.abort()


class StatusInquiry:
    """Asks instances that push here and have fallen silent for their status. Loop thread only.

    The TCP connection to an instance that does not answer is kept open. A stopped process accepts
    no connections, and once its kernel's backlog is full, a new connection attempt gets no answer,
    just as if the host were gone. A connection that was established before persists for as long as
    the host does, so it tells the two cases apart.

    Args:
        peers: table of all peers.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._connections: dict[tuple[str, int], _IdleConnection] = {}

    async def ask(
        self, writer: PeerAddress, request_ids: Sequence[str], *, is_local: bool
    ) -> StatusReply:
        """Ask an instance for the status of its pushes.

        Args:
            writer: the epoch, and the address of its side channel.
            request_ids: its own names of the requests.
            is_local: whether its side channel is in this process' network namespace.

        Raises:
            PeerGone: our own kernel says that nothing listens at its address, or another instance
                does. A side channel listens for as long as its process may write, so it is dead.
            PeerAbsent: the same, said by another host, which may not be the writer's; or what
                answers there has another secret or version, or rejects the question.
            PeerUnreachable: nothing at its address answers, not even a kernel.
            KVTransferError: the status is unknown.
        """
        try:
            await self._connect(writer)
        except ConnectionRefusedError as exc:
            raise await self._replaced(writer, "nothing", is_local=is_local) from exc
        except (OSError, asyncio.TimeoutError) as exc:
            reason = f"instance {writer.engine_id} can't be reached: {exc!r}"
            is_ours = is_local and await is_own_address(writer.host)
            if is_ours or (isinstance(exc, OSError) and exc.errno in _LOCAL_SHORTAGES):
                raise KVTransferError(reason) from exc
            raise PeerUnreachable(reason) from exc
        named = tuple(request_ids)
        try:
            reply = await self._peers.get(writer).client.ask(
                lambda ticket: StatusRequest(ticket, named), StatusReply, tries=1
            )
        except HandshakeRefused as exc:
            self._disconnect(writer)
            # The writer has our secret and version, and does not reject this question. It may
            # still live if this is the work of something in between.
            raise await self._replaced(writer, f"something else ({exc})", is_local=False) from exc
        self._disconnect(writer)
        if reply.engine_id != writer.engine_id:
            raise await self._replaced(writer, reply.engine_id, is_local=is_local)
        return reply

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def _connect(self, writer: PeerAddress) -> None:
        """Connect, if not yet connected. The kernel completes the connection for a process that
        lives, however busy it is."""
        connection = self._connections.get((writer.host, writer.port))
        if connection is not None and not connection.closed.is_set():
            return
        async with timeout(CONNECT_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_IdleConnection, writer.host, writer.port)
        self._disconnect(writer)  # a concurrent inquiry may have connected first
        self._connections = {
            at: each for at, each in self._connections.items() if not each.closed.is_set()
        }
        self._connections[writer.host, writer.port] = connection

    def _disconnect(self, writer: PeerAddress) -> None:
        connection = self._connections.pop((writer.host, writer.port), None)
        if connection is not None:
            connection.close()

    async def _replaced(
        self, writer: PeerAddress, found: str, *, is_local: bool
    ) -> PeerGone | PeerAbsent:
        """The exception to raise when ``found`` listens at the writer's address."""
        self._peers.forget(writer, f"{found} listens there now")
        if is_local and await is_own_address(writer.host):
            return PeerGone(f"instance {writer.engine_id} is gone: {found} listens there")
        where = f"{writer.host} port {writer.port}"
        return PeerAbsent(
            f"instance {writer.engine_id} is not at {where} any more: {found} listens"
        )
