"""An endpoint whose bytes move by a driver: verbs, or another transfer engine.

The endpoint owns the control plane, which is the same for all of them: who may connect, what is
registered, when a peer is gone. The driver registers memory with its hardware or engine, answers
the peers' calls, and makes the peers that read and write.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from typing import Protocol, TypeVar

from mooncake_hal.errors import (
    PeerLost,
    RegionRevoked,
    RegionUnknown,
    TransferError,
    TransportUnavailable,
    VersionMismatch,
)
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Peer
from mooncake_hal.transports.control.listener import Listener, dial
from mooncake_hal.transports.control.messages import (
    AnyMessage,
    ControlAddress,
    Registered,
    Revoked,
)
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import Deployment, decode_address, encode, fresh_epoch
from mooncake_hal.transports.listening import advertised_host, open_listener

logger = logging.getLogger(__name__)

Facts = TypeVar("Facts")

BACKLOG = 64

REVOKE_SECONDS = 1.0
"""How long revoke() waits for connected peers to take it in; access is gone before that."""


class DrivenPeer(Peer, Protocol):
    """A peer that the endpoint can tell about the end of its connection."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        ...

    def lost(self, error: TransferError) -> None:
        """The control connection is over: fail and drain everything. Idempotent, any thread."""
        ...


class Driver(Protocol):
    """What moves the bytes. Methods may be called from any thread, never two for one key."""

    @property
    def name(self) -> str:
        """Name of the transport."""
        ...

    @property
    def version(self) -> int:
        """Version of what the driver's two ends say to each other."""
        ...

    def facts(self) -> bytes:
        """What a peer needs to judge reach, and to connect."""
        ...

    def unreachable(self, facts: bytes) -> str | None:
        """Why the peer that published ``facts`` can't be reached, or None if it can."""
        ...

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """Register memory; return what a peer needs to reach it.

        Raises:
            TransferError: the hardware or engine refuses it.
        """
        ...

    def detach(self, key: int) -> None:
        """Withdraw memory: our own transfers in it have ended when this returns."""
        ...

    def answer(self, session: Session, payload: bytes) -> bytes:
        """Answer a call of a peer that dialled us."""
        ...

    def departed(self, session: Session) -> None:
        """A peer that dialled us is gone: free what was held for it."""
        ...

    def dial(self, session: Session, facts: bytes, timeout: float) -> DrivenPeer:
        """Make a peer over a fresh session."""
        ...

    def close(self) -> None:
        """Free everything; all peers, sessions and regions are gone already."""
        ...


class ControlledEndpoint:
    """See ``Endpoint``; one per driver.

    Args:
        driver: what moves the bytes; closed with the endpoint.
        local: the table that ``driver`` looks its local addresses up in; filled here.
        options: how to open it.
    """

    def __init__(self, driver: Driver, local: AttachedRegions, options: EndpointOptions) -> None:
        self._driver = driver
        self._local = local
        self._live: dict[int, Registered] = {}
        self._next_key = 0
        self._lock = threading.RLock()  # order of announcements; held while sending them
        self._guests: set[Session] = set()
        self._peers: list[DrivenPeer] = []
        self._closed = False
        self._deployment = Deployment(options.secret, driver.name, driver.version)
        epoch = fresh_epoch()
        sock = open_listener(options, driver.name, BACKLOG)
        try:
            host = advertised_host(options, sock)
        except ValueError:
            sock.close()
            raise
        self._listener = Listener(sock, self._deployment, epoch, self._serve)
        address = ControlAddress(
            driver.name,
            driver.version,
            epoch,
            host,
            self._listener.port,
            driver.facts(),
        )
        self._address = encode(address)

    @property
    def transport(self) -> str:
        """See ``Endpoint``."""
        return self._driver.name

    @property
    def address(self) -> bytes:
        """See ``Endpoint``."""
        return self._address

    def register(self, region: MemoryRegion) -> int:
        """See ``Endpoint``."""
        with self._lock:
            self._require_open()
            self._local.require_room(region)
            self._next_key += 1
            key = self._next_key
            attachment = self._driver.attach(key, region)
            self._local.add(key, region, attachment)
            self._live[key] = Registered(
                key, region.address, region.nbytes, region.device, attachment
            )
            self._announce(self._live[key])
        return key

    def revoke(self, key: int) -> None:
        """See ``Endpoint``."""
        with self._lock:
            self._require_open()
            if key not in self._live:
                seen = 0 < key <= self._next_key
                kind = RegionRevoked if seen else RegionUnknown
                raise kind(f"this endpoint has no region {key} to revoke")
            del self._live[key]
            self._local.revoke(key)
        self._driver.detach(key)
        with self._lock:
            self._announce(Revoked(key))
            guests = list(self._guests)
        _await_all(guests, REVOKE_SECONDS)

    def connect(self, address: bytes, *, timeout: float) -> Peer:
        """See ``Endpoint``."""
        deadline = time.monotonic() + timeout
        self._require_open()
        wanted = self._checked_address(address)
        sock = dial(wanted.host, wanted.port, self._deployment, wanted.epoch, timeout)
        session = Session(sock, _answer_nothing)
        session.start(f"{self._driver.name}-control")
        with ExitStack() as undo:
            undo.callback(session.close)
            session.barrier(max(0.0, deadline - time.monotonic()))
            left = max(0.0, deadline - time.monotonic())
            peer = self._driver.dial(session, wanted.facts, left)
            undo.callback(peer.close)
            session.watch(lambda ended: peer.lost(ended.error or PeerLost("the peer is gone")))
            with self._lock:
                self._require_open()
                self._peers = [known for known in self._peers if not known.closed]
                self._peers.append(peer)
            undo.pop_all()
        return peer

    def close(self) -> None:
        """See ``Endpoint``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers, guests = list(self._peers), list(self._guests)
            keys, self._live = list(self._live), {}
        for peer in peers:
            peer.close()
        for guest in guests:
            guest.close()
        self._listener.close()
        for key in keys:
            self._local.revoke(key)
            self._driver.detach(key)
        self._driver.close()

    def _serve(self, sock: socket.socket) -> None:
        """Hold one peer's connection, from its welcome to its end."""
        session = Session(sock, self._driver.answer)
        try:
            with self._lock:
                if self._closed:
                    return
                self._guests.add(session)
                for message in self._live.values():
                    session.send(message)
            session.run()
        except PeerLost as exc:
            logger.debug("a peer left while it was told what is registered: %s", exc)
        finally:
            with self._lock:
                self._guests.discard(session)
            self._driver.departed(session)
            session.close()

    def _announce(self, message: AnyMessage) -> None:
        """Tell every connected peer; who can't be told is dropped."""
        for guest in list(self._guests):
            try:
                guest.send(message)
            except PeerLost as exc:
                logger.warning("%s: dropping a peer: %s", self._driver.name, exc)
                guest.hang_up()

    def _checked_address(self, address: bytes) -> ControlAddress:
        wanted = read_address(address, self._driver.name, self._driver.version)
        reason = self._driver.unreachable(wanted.facts)
        if reason is not None:
            raise TransportUnavailable(self._driver.name, reason)
        return wanted

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError(f"this {self._driver.name} endpoint is closed")


def open_endpoint(
    driver: Driver, local: AttachedRegions, options: EndpointOptions
) -> ControlledEndpoint:
    """Open a driver's endpoint; the driver is closed if that fails. See ``ControlledEndpoint``."""
    try:
        return ControlledEndpoint(driver, local, options)
    except BaseException:
        driver.close()
        raise


def compare_addresses(
    addresses: tuple[bytes, bytes],
    transport: str,
    version: int,
    decode: Callable[[bytes], Facts],
    why_apart: Callable[[Facts, Facts], str | None],
) -> str | None:
    """Say why two published addresses can't reach each other, or None; see ``Transport.reaches``.

    Args:
        addresses: ours and theirs.
        transport, version: what both must be of.
        decode: reads the facts in them; TransferError where they make no sense.
        why_apart: compares these.
    """
    try:
        ours, theirs = (read_address(address, transport, version) for address in addresses)
        return why_apart(decode(ours.facts), decode(theirs.facts))
    except TransferError as exc:
        return str(exc)


def read_address(address: bytes, transport: str, version: int) -> ControlAddress:
    """Read a published address.

    Raises:
        TransferError: it is none of this transport.
        VersionMismatch: it is one of another version.
    """
    found = decode_address(address, ControlAddress, transport)
    if found.transport != transport:
        raise TransferError(f"this is an address of {found.transport!r}, not of {transport!r}")
    if found.version != version:
        raise VersionMismatch(
            f"{transport}: we speak version {version}, the peer {found.version}; "
            "run one release of mooncake-hal on both"
        )
    return found


def _answer_nothing(session: Session, payload: bytes) -> bytes:
    raise TransferError("the side that dialled answers no calls")


def _await_all(sessions: list[Session], timeout: float) -> None:
    """Wait until every session's peer has taken in what was sent, or is gone, or is too slow."""
    deadline = time.monotonic() + timeout
    for pong in [session.ping() for session in sessions]:
        try:
            pong.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            logger.warning("a peer did not confirm a revocation within %g s", timeout)
        except TransferError as exc:
            logger.debug("a peer left during a revocation: %s", exc)
