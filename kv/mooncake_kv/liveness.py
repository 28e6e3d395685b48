"""Keepalives to peers that hold something for us, and a look for peers that have fallen silent."""

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
from mooncake_kv.errors import KVTransferError, PeerAbsent, PeerGone, PeerUnreachable
from mooncake_kv.io_loop import Spawn
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import PeerAddress, PeerTable
from mooncake_kv.protocol import StatusReply, StatusRequest

logger = logging.getLogger(__name__)

KEEPALIVES_PER_LEASE = 6
LONGEST_PUSH_PAUSE_S = 1.0
"""Between the keepalives of an instance that pushes, however long the leases are."""

SHORTEST_PAUSE_S = 0.02
"""Whatever lease a request names."""


class HasRemote(Protocol):
    """Something that a peer holds for us, or waits for."""

    @property
    def remote(self) -> RemoteKV:
        """What, and where."""
        ...


Item = TypeVar("Item", bound=HasRemote)
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class KeepaliveInterval:
    """How often signs are given.

    Args:
        lease_s: how long this instance itself waits.
        longest_s: the longest pause, however long the leases are.
    """

    lease_s: float
    longest_s: float = float("inf")

    def of(self, remotes: Iterable[RemoteKV]) -> float:
        """Seconds between keepalives: a sixth of the shortest lease among these peers and us."""
        leases = (remote.lease_s for remote in remotes if remote.lease_s is not None)
        shortest_s = min((self.lease_s, *leases))
        return max(min(shortest_s / KEEPALIVES_PER_LEASE, self.longest_s), SHORTEST_PAUSE_S)


class Keepalive(Generic[Item]):
    """One message per peer and pause; a silent peer delays no other. Loop thread only.

    Args:
        interval: how often.
        send: sends a peer one keepalive for these items, by request id, within that many seconds.
        spawn: runs a task on the loop.
        has_stalled: whether the engine does not step: nothing is sent meanwhile.
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
        self._is_silent = False
        self._in_flight: set[_Key] = set()
        self._pause_s = 0.0
        self._is_shorter = asyncio.Event()

    def hasten(self, remote: RemoteKV) -> None:
        """Start covering this peer; wake up early if its lease is shorter."""
        if self._interval.of([remote]) < self._pause_s:
            self._is_shorter.set()

    async def give(self, concerned: Callable[[], Mapping[str, Item]]) -> None:
        """Send every peer a keepalive for what it holds, again and again, until cancelled."""
        while True:
            await self._pause(concerned)
            if self._must_be_silent():
                continue
            by_peer: defaultdict[_Key, dict[str, Item]] = defaultdict(dict)
            for request_id, item in concerned().items():
                remote = item.remote
                by_peer[remote.engine_id, remote.host, remote.port][request_id] = item
            for key, group in by_peer.items():
                if key not in self._in_flight:
                    self._in_flight.add(key)
                    self._spawn(self._send_one(key, group))

    def _must_be_silent(self) -> bool:
        """Whether peers should take this instance for dead: what they keep for it would be kept for
        as long as a step hangs."""
        was_silent, self._is_silent = self._is_silent, self._has_stalled()
        if self._is_silent and not was_silent:
            logger.error("no step of the engine returns: keepalives to peers are suspended")
        return self._is_silent

    async def _send_one(self, key: _Key, group: dict[str, Item]) -> None:
        try:
            await self._send(group, self._interval.of(item.remote for item in group.values()))
        finally:
            self._in_flight.discard(key)

    async def _pause(self, concerned: Callable[[], Mapping[str, Item]]) -> None:
        """Wait until the next keepalive is due; a shorter lease cuts it short."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._pause_s = self._longest_pause(concerned())
        while (left_s := began + self._pause_s - loop.time()) > 0:
            self._is_shorter.clear()
            with suppress(asyncio.TimeoutError):
                async with timeout(left_s):
                    await self._is_shorter.wait()
            self._pause_s = min(self._pause_s, self._longest_pause(concerned()))

    def _longest_pause(self, concerned: Mapping[str, Item]) -> float:
        return self._interval.of(item.remote for item in concerned.values())


CONNECT_TIMEOUT_S = 2.0

_OWN_SHORTAGES = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EADDRNOTAVAIL,
)
"""Why this host connects to nobody: they say nothing of the other one."""


class _Line(asyncio.BaseProtocol):
    """A connection over which nothing is said; its kernel's keepalives find out if a host dies."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        with suppress(OSError):  # it is over already, which is noticed next
            tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        pass  # the peer's greeting

    def eof_received(self) -> None:
        pass  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    def hang_up(self) -> None:
        """End it. Idempotent."""
        self.over.set()
        if self._transport is not None:
            self._transport.abort()


class StatusInquiry:
    """Looks for instances that push here and have fallen silent. Loop thread only.

    The connection to one that does not answer is held. A process that is stopped accepts none, and
    once as many wait as its kernel keeps, the next one gets no answer, as from a host that is gone;
    one that was there before stays, and ends when that host does.

    Args:
        peers: of all peers.
    """

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._lines: dict[tuple[str, int], _Line] = {}

    async def ask(
        self, writer: PeerAddress, request_ids: Sequence[str], *, is_near: bool
    ) -> StatusReply:
        """Ask an instance how its pushes stand.

        Args:
            writer: the epoch, and its side channel.
            request_ids: its own names for them.
            is_near: whether its side channel is in this process' network namespace.

        Raises:
            PeerGone: nothing listens at its address, or another instance, and our own kernel says
                so. A side channel listens for as long as its process may write: it is dead.
            PeerAbsent: the same, said by another host, which may not be the writer's.
            PeerUnreachable: nothing answers there, not even a kernel.
            KVTransferError: it can't be known.
        """
        try:
            await self._reach(writer)
        except ConnectionRefusedError as exc:
            raise await self._missing(writer, "nobody", is_near=is_near) from exc
        except (OSError, asyncio.TimeoutError) as exc:
            reason = f"instance {writer.engine_id} can't be reached: {exc!r}"
            is_ours = is_near and await is_own_address(writer.host)
            if is_ours or (isinstance(exc, OSError) and exc.errno in _OWN_SHORTAGES):
                raise KVTransferError(reason) from exc
            raise PeerUnreachable(reason) from exc
        named = tuple(request_ids)
        reply = await self._peers.get(writer).client.ask(
            lambda ticket: StatusRequest(ticket, named), StatusReply, tries=1
        )
        self._hang_up(writer)
        if reply.engine_id != writer.engine_id:
            raise await self._missing(writer, reply.engine_id, is_near=is_near)
        return reply

    def close(self) -> None:
        """Hold no connection any more. Idempotent."""
        for line in self._lines.values():
            line.hang_up()
        self._lines.clear()

    async def _reach(self, writer: PeerAddress) -> None:
        """Connect, if we are not: a kernel answers for a process that lives, however busy."""
        line = self._lines.get((writer.host, writer.port))
        if line is not None and not line.over.is_set():
            return
        async with timeout(CONNECT_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            _, line = await loop.create_connection(_Line, writer.host, writer.port)
        self._hang_up(writer)  # another look at it may have been faster
        self._lines = {at: each for at, each in self._lines.items() if not each.over.is_set()}
        self._lines[writer.host, writer.port] = line

    def _hang_up(self, writer: PeerAddress) -> None:
        line = self._lines.pop((writer.host, writer.port), None)
        if line is not None:
            line.hang_up()

    async def _missing(
        self, writer: PeerAddress, found: str, *, is_near: bool
    ) -> PeerGone | PeerAbsent:
        """What to raise when ``found`` listens where the writer did."""
        self._peers.forget(writer, f"{found} listens there now")
        if is_near and await is_own_address(writer.host):
            return PeerGone(f"instance {writer.engine_id} is gone: {found} listens there")
        where = f"{writer.host} port {writer.port}"
        return PeerAbsent(
            f"instance {writer.engine_id} is not at {where} any more: {found} listens"
        )
