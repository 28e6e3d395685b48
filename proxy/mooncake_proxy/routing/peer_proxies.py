"""Exchanges reservations with proxies on other hosts that serve the same instances.

Every process posts the reservation changes of its conductors to every peer, one message at a time
and in order; after a failure, and from time to time, it posts a snapshot. The reservations of a
process that is silent for EXPIRE_S are released. Messages are signed with a secret that these
proxies share. Imported only if there are peers: reservations need numpy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from mooncake_api.instance_protocol import is_signed, signed_digest, signed_head
from mooncake_proxy.api.admin_routes import RESERVATIONS_PATH
from mooncake_proxy.errors import DECODE_ERRORS, BadRequest, Forbidden, UpstreamError
from mooncake_proxy.http1.connection_pool import ConnectionPool
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.routing.conductor_fleet import OWNER
from mooncake_proxy.routing.reservation_sharing import (
    VERSION,
    ReceivedReports,
    ReservationReport,
    ReservationSharing,
    ReservationUpdate,
)

logger = logging.getLogger(__name__)
# `OWNER.NUMBER.SHA256-OF-BODY.HMAC`, all but the owner as hex.
HEADER = b"x-mooncake-peer"
HEARTBEAT_S = 1.0
SNAPSHOT_S = 10.0
POST_TIMEOUT_S = 2.0
# The reservations of a process that is silent for this long are released.
EXPIRE_S = 5.0
MAX_PENDING = 4096
MAX_MESSAGE_BYTES = 120_000
# Bound of the remote processes whose last message number is kept, to detect replayed messages.
MAX_OWNERS = 4096


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(ReservationReport)


class _AnyReport(msgspec.Struct):
    """What reports of all versions have."""

    owner: str
    number: int
    version: int = VERSION


_head_decoder = msgspec.json.Decoder(_AnyReport)


@dataclass(slots=True)
class _Owner(ReceivedReports):
    """State of the reports received from one process of another proxy."""

    received_at: float = 0.0
    is_gone: bool = False
    # Whether it has been logged that it runs another release.
    is_noted: bool = False


@dataclass(slots=True, eq=False)
class _Peer:
    """A proxy to which this process posts its reservations."""

    origin: Origin
    connections: ConnectionPool
    pending: list[ReservationUpdate] = field(default_factory=list)
    # Set when there are pending changes.
    wakes: asyncio.Event = field(default_factory=asyncio.Event)
    wants_snapshot: bool = True
    is_reached: bool = True
    snapshot_at: float = 0.0
    number: int = 0


class PeerProxies:
    """Sends reservations to peers and receives theirs."""

    def __init__(
        self,
        urls: tuple[str, ...],
        secret: str,
        sharing: ReservationSharing,
        client: ClientContext,
    ) -> None:
        self._secret = secret.encode()
        self._sharing = sharing
        self._now = client.loop.time
        # Called with every accepted message, to pass it to the other workers of this proxy.
        self.forward: Callable[[bytes], None] = _ignore
        origins = [Origin.parse(url) for url in urls]
        self._peers = [_Peer(origin, ConnectionPool(origin, client)) for origin in origins]
        self._owners: OrderedDict[str, _Owner] = OrderedDict()
        sharing.add_listener(self._add)

    # ------------------------------------------------ sending

    async def run(self) -> None:
        """Send to all peers, and expire silent processes, until cancelled."""
        senders = [asyncio.ensure_future(self._send_to(peer)) for peer in self._peers]
        try:
            await asyncio.gather(self._expire(), *senders)
        finally:
            for task in senders:
                task.cancel()
            for peer in self._peers:
                peer.connections.close()

    def _add(self, update: ReservationUpdate) -> None:
        for peer in self._peers:
            if len(peer.pending) >= MAX_PENDING:
                peer.pending.clear()
                peer.wants_snapshot = True
            peer.pending.append(update)
            peer.wakes.set()

    async def _send_to(self, peer: _Peer) -> None:
        while True:
            with suppress(asyncio.TimeoutError):  # then send a heartbeat
                await asyncio.wait_for(peer.wakes.wait(), HEARTBEAT_S)
            peer.wakes.clear()
            for message in self._messages(peer):
                if not await self._post(peer, message):
                    peer.wants_snapshot = True
                    await asyncio.sleep(HEARTBEAT_S)
                    break

    def _messages(self, peer: _Peer) -> Iterator[ReservationReport]:
        pending, peer.pending = peer.pending, []
        is_snapshot = peer.wants_snapshot or self._now() - peer.snapshot_at > SNAPSHOT_S
        if is_snapshot:  # it includes the pending changes
            peer.wants_snapshot, peer.snapshot_at = False, self._now()
            pending = self._sharing.snapshot()
        parts = list(_in_parts(pending))
        for position, part in enumerate(parts):
            message = ReservationReport(OWNER, peer.number, is_snapshot=is_snapshot, updates=part)
            message.begins_snapshot = is_snapshot and position == 0
            message.ends_snapshot = is_snapshot and position == len(parts) - 1
            peer.number += 1
            yield message

    async def _post(self, peer: _Peer, message: ReservationReport) -> bool:
        body = _encode(message)
        origin = peer.origin
        signed = signed_head(self._secret, f"{message.owner}.{message.number:x}", body)
        head = (
            f"POST {origin.prefix}{RESERVATIONS_PATH} HTTP/1.1\r\nhost: {origin.authority}\r\n"
            f"content-type: application/json\r\n{HEADER.decode()}: {signed}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        try:
            await peer.connections.fetch(
                head.encode("latin-1") + body, self._now() + POST_TIMEOUT_S
            )
        except UpstreamError as exc:
            if peer.is_reached:
                logger.warning("can't send reservations to proxy %s: %s", origin, exc)
            peer.is_reached = False
            return False
        if not peer.is_reached:
            logger.info("proxy %s receives reservations again", origin)
        peer.is_reached = True
        return True

    # ------------------------------------------------ receiving

    def is_peer(self, headers: dict[bytes, bytes]) -> bool:
        """Whether the request's head is signed by a peer. Only then is its body read."""
        return signed_digest(self._secret, headers.get(HEADER, b"")) is not None

    def receive(self, headers: dict[bytes, bytes], body: bytes) -> None:
        """Receive a peer's message.

        Raises:
            Forbidden: the message is not signed with the shared secret.
            BadRequest: the message can't be decoded.
        """
        if not is_signed(self._secret, headers.get(HEADER, b""), body):
            raise Forbidden("not signed with this proxy's --peer-secret-file")
        self.apply(body)
        self.forward(body)

    def apply(self, body: bytes) -> None:
        """Apply a message whose signature this or another worker has checked.

        What a proxy of another release sends, and this one does not know, is left out.
        """
        try:
            head = _head_decoder.decode(body)
            is_known = head.version == VERSION
            message = (
                _decoder.decode(body) if is_known else ReservationReport(head.owner, head.number)
            )
        except DECODE_ERRORS as exc:
            raise BadRequest(f"reservations: {exc}") from exc
        if message.owner == OWNER:
            return  # this proxy is among its own peers
        owner = self._owners.setdefault(message.owner, _Owner())
        if not owner.apply(message, self._sharing):
            return  # received before
        if not owner.is_noted and (owner.has_unknown or not is_known):
            owner.is_noted = True
            logger.warning(
                "a process of a peer proxy is of another release, not all of its reservations are "
                "known here (version %d, here %d)",
                *(head.version, VERSION),
            )
        owner.received_at, owner.is_gone = self._now(), False
        self._owners.move_to_end(message.owner)
        while len(self._owners) > MAX_OWNERS:
            self._sharing.forget(self._owners.popitem(last=False)[0])

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for name, owner in self._owners.items():
                if not owner.is_gone and self._now() - owner.received_at > EXPIRE_S:
                    owner.is_gone, owner.named = True, None
                    logger.warning(
                        "a peer proxy's process is silent: its reservations are released"
                    )
                    self._sharing.forget(name)


def _ignore(body: bytes) -> None:
    """Default of `forward`: there are no other workers."""


def _in_parts(updates: list[ReservationUpdate]) -> Iterator[list[ReservationUpdate]]:
    """Split changes into messages of limited size; a single empty one (a heartbeat) if there are
    none."""
    part: list[ReservationUpdate] = []
    size = 0
    for each in updates:
        if part and size + len(each.changes) > MAX_MESSAGE_BYTES:
            yield part
            part, size = [], 0
        part.append(each)
        size += len(each.changes)
    yield part
