"""The short way to write a transport: a data path, and this endpoint around it.

The endpoint owns the control plane, which is the same for every transport: who may connect, what is
registered, what is revoked, when a peer is gone. The data path registers memory with its hardware
or engine, replies to the peers' requests, and makes the peers that read and write. A transport is
then a ``DataPath``, a ``DataPathPeer``, and a ``Transport`` whose ``open`` calls ``open_endpoint``
and whose ``reaches`` calls ``compare_addresses``; ``docs/examples/mylink`` is one.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from typing import Protocol, TypeVar

import msgspec

from mooncake_hal.errors import (
    PeerLost,
    RegionRevoked,
    RegionUnknown,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
    VersionMismatch,
)
from mooncake_hal.session.addressing import advertised_host, open_listener
from mooncake_hal.session.authentication import Credentials, decode_address, encode, fresh_epoch
from mooncake_hal.session.frames import Registered, Revoked
from mooncake_hal.session.listener import Listener, ProvenSocket, dial
from mooncake_hal.session.regions import AttachedRegions
from mooncake_hal.session.session import Session, refuse_requests
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Peer

logger = logging.getLogger(__name__)

Facts = TypeVar("Facts")

BACKLOG = 64

BACKLOG_PAUSE_SECONDS = 0.01

SharedFd = Callable[[MemoryRegion], "int | None"]
"""Says which descriptor goes to the peers with a region, if any."""

REVOKE_SECONDS = 1.0
"""How long revoke() waits for connected peers to take it in; access is gone before that."""

CLOSE_SECONDS = 5.0
"""How long close() waits for peers that touch our memory on their own to let go."""


class SessionAddress(
    msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True
):
    """What an endpoint publishes.

    Args:
        transport: name of the transport.
        version: version of its protocol.
        epoch: identity of this endpoint; a restarted one has another.
        host: where sessions are accepted; for a Unix socket, its abstract name.
        port: the TCP port; 0 for a Unix socket.
        info: what the data path needs to judge reach, in its own encoding.
    """

    transport: str
    version: int
    epoch: bytes
    host: str
    port: int
    info: bytes


class DataPathPeer(Peer, Protocol):
    """A peer that the endpoint notifies of the end of its session."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        ...

    def lost(self, error: TransferError) -> None:
        """The session is over: fail and drain everything. Idempotent, from any thread.

        Requests over the session have failed by then; a peer that waits for nothing else inherits
        this.
        """
        return


class DataPath(Protocol):
    """What moves the bytes of one endpoint: all that a transport has to write beside its peers.

    Methods may be called from any thread, and several at once, but never two for one key. The order
    is: ``info`` once; ``attach`` and ``detach`` per region, ``connect`` per peer that we read from,
    ``handle_request`` and ``session_ended`` per peer that connected to us; ``close`` last.
    """

    @property
    def name(self) -> str:
        """Name of the transport."""
        ...

    @property
    def version(self) -> int:
        """Version of what the data path's two ends say to each other."""
        ...

    def info(self) -> bytes:
        """Return what a peer needs to judge reach and to connect; published in the address.

        Anyone may read it: nothing in it may give access to memory.
        """
        ...

    def unreachable_reason(self, info: bytes) -> str | None:
        """Say why the peer that published ``info`` can't be reached, or None if it can.

        Raises:
            TransferError: ``info`` is not of this data path.
        """
        ...

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """Register memory; return what a peer needs to reach it: its "attachment".

        The endpoint sends it to every peer that has proved itself, in ``Session.regions``.

        Raises:
            TransferError: the hardware or engine refuses it.
        """
        ...

    def detach(self, key: int) -> None:
        """Withdraw memory, which is out of the local table already.

        When this returns, our own transfers in it have ended, and, where the transport can revoke,
        those of peers; only then are the peers notified.
        """
        ...

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        """Reply to a request of a peer that connected to us, on its session's thread.

        Raises:
            HalError: its message goes back as a refusal.
        """
        ...

    def session_ended(self, session: Session) -> None:
        """A peer that connected to us is gone: free what was held for it, if anything was."""
        return

    def connect(self, session: Session, info: bytes, timeout: float) -> DataPathPeer:
        """Make a peer over a fresh session, which is the peer's to close.

        Every region that the other end had registered is in ``session.regions`` already.

        Args:
            session: to the other end, proven.
            info: what the other end published.
            timeout: for all of it, in seconds.

        Raises:
            TransferError: it can't be made; the session is closed then.
        """
        ...

    def close(self) -> None:
        """Free what is left; all peers, sessions and regions are gone already."""
        return


class SessionEndpoint:
    """The control plane around one data path; made by ``open_endpoint``."""

    def __init__(
        self,
        data_path: DataPath,
        local: AttachedRegions,
        options: EndpointOptions,
        *,
        shared_fd: SharedFd | None = None,
        confirm_s: float | None = None,
    ) -> None:
        self._data_path = data_path
        self._local = local
        self._confirm_s = confirm_s
        self._live: dict[int, Registered] = {}
        self._shared_fd = shared_fd
        self._fds: dict[int, int | None] = {}
        self._next_key = 0
        self._lock = threading.RLock()  # order of announcements; held while sending them
        self._guests: set[Session] = set()
        self._peers: list[DataPathPeer] = []
        self._closed = False
        self._credentials = Credentials(options.secret, data_path.name, data_path.version)
        epoch = fresh_epoch()
        sock, host, port = _listen_locally() if shared_fd else _listen(options, data_path.name)
        address = SessionAddress(
            data_path.name, data_path.version, epoch, host, port, data_path.info()
        )
        self._address = encode(address)
        self._listener = Listener(sock, self._credentials, epoch, self._serve)

    @property
    def transport(self) -> str:
        return self._data_path.name

    @property
    def address(self) -> bytes:
        return self._address

    def register(self, region: MemoryRegion) -> int:
        with self._lock:
            self._require_open()
            self._local.require_room(region)
            self._next_key += 1
            key = self._next_key
            attachment = self._data_path.attach(key, region)
            self._local.add(key, region, attachment)
            message = Registered(key, region.address, region.nbytes, region.device, attachment)
            self._live[key] = message
            if self._shared_fd is not None:
                self._fds[key] = self._shared_fd(region)
            self._announce(message)
        return key

    def revoke(self, key: int) -> None:
        with self._lock:
            self._require_open()
            if key not in self._live:
                seen = 0 < key <= self._next_key
                kind = RegionRevoked if seen else RegionUnknown
                raise kind(f"this endpoint has no region {key} to revoke")
            del self._live[key]
            self._fds.pop(key, None)
            self._local.revoke(key)
        self._data_path.detach(key)
        with self._lock:
            missed = self._announce(Revoked(key))
            guests = [guest for guest in self._guests if guest not in missed]
        late = missed + _await_all(guests, self._confirm_s or REVOKE_SECONDS)
        if late and self._confirm_s is not None:
            raise TransferTimeout(
                f"{self.transport}: a client did not give up region {key} within "
                f"{self._confirm_s:g} s; its process may be stopped. End it before the memory is "
                "used for something else"
            )

    def connect(self, address: bytes, *, timeout: float) -> Peer:
        deadline = time.monotonic() + timeout
        self._require_open()
        wanted = self._checked_address(address)
        proven = dial(
            lambda seconds: open_socket(wanted, seconds),
            f"{wanted.host}:{wanted.port}" if wanted.port else f"@{wanted.host}",
            self._credentials,
            wanted.epoch,
            timeout,
        )
        session = Session(proven, refuse_requests)
        session.start(f"{self.transport}-session")
        with ExitStack() as undo:
            undo.callback(session.close)
            session.barrier(max(0.0, deadline - time.monotonic()))
            left = max(0.0, deadline - time.monotonic())
            peer = self._data_path.connect(session, wanted.info, left)
            undo.callback(peer.close)
            session.watch(lambda ended: peer.lost(ended.error or PeerLost("the peer is gone")))
            with self._lock:
                self._require_open()
                self._peers = [known for known in self._peers if not known.closed]
                self._peers.append(peer)
            undo.pop_all()
        return peer

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers, guests = list(self._peers), list(self._guests)
            keys, self._live = list(self._live), {}
            if self._confirm_s is not None:
                for key in keys:
                    self._announce(Revoked(key))
        for peer in peers:
            peer.close()
        if self._confirm_s is not None:
            _await_all(guests, CLOSE_SECONDS)
        for guest in guests:
            guest.close()
        self._listener.close()
        for key in keys:
            self._local.revoke(key)
            self._data_path.detach(key)
        self._data_path.close()

    def _serve(self, proven: ProvenSocket) -> None:
        """Hold one peer's session, from its welcome to its end."""
        session = Session(proven, self._data_path.handle_request)
        try:
            with self._lock:
                if self._closed:
                    return
                self._guests.add(session)
                for message in self._live.values():
                    self._send(session, message)
            session.run()
        except PeerLost as exc:
            logger.debug("a peer left while it was sent what is registered: %s", exc)
        finally:
            with self._lock:
                self._guests.discard(session)
            self._data_path.session_ended(session)
            session.close()

    def _announce(self, message: Registered | Revoked) -> list[Session]:
        """Send to every connected peer; those that do not take it are dropped, and returned."""
        missed = []
        for guest in list(self._guests):
            try:
                self._send(guest, message)
            except PeerLost as exc:
                if not guest.is_hung_up():
                    logger.warning("%s: dropping a peer: %s", self.transport, exc)
                    missed.append(guest)
                guest.hang_up()
        return missed

    def _send(self, guest: Session, message: Registered | Revoked) -> None:
        fd = self._fds.get(message.key) if isinstance(message, Registered) else None
        guest.send(message, fd)

    def _checked_address(self, address: bytes) -> SessionAddress:
        wanted = read_address(address, self.transport, self._data_path.version)
        reason = self._data_path.unreachable_reason(wanted.info)
        if reason is not None:
            raise TransportUnavailable(self.transport, reason)
        return wanted

    def _require_open(self) -> None:
        if self._listener.error is not None:
            raise TransferError(f"{self.transport}: listening failed") from self._listener.error
        if self._closed:
            raise TransferError(f"this {self.transport} endpoint is closed")


def open_endpoint(
    data_path: DataPath,
    local: AttachedRegions,
    options: EndpointOptions,
    *,
    shared_fd: SharedFd | None = None,
    confirm_s: float | None = None,
) -> SessionEndpoint:
    """Open a data path's endpoint; the data path is closed if that fails.

    Args:
        data_path: what moves the bytes; closed with the endpoint.
        local: the table that it looks its local addresses up in; filled by the endpoint.
        options: how to open it.
        shared_fd: for data paths between processes of one host: sessions are accepted on a Unix
            socket, and this says which descriptor goes to the peers with a region. None: on TCP.
        confirm_s: for data paths whose peers touch our memory with no help of ours: revoking waits
            for every peer to let go, this long, and fails if one does not. None if the data path
            itself ends all access.

    Raises:
        OSError, PortsExhausted, ValueError: see ``Transport.open``.
    """
    try:
        return SessionEndpoint(data_path, local, options, shared_fd=shared_fd, confirm_s=confirm_s)
    except BaseException:
        data_path.close()
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
        return why_apart(decode(ours.info), decode(theirs.info))
    except TransferError as exc:
        return str(exc)


def read_address(address: bytes, transport: str, version: int) -> SessionAddress:
    """Read a published address.

    Raises:
        TransferError: it is none of this transport.
        VersionMismatch: it is one of another version.
    """
    found = decode_address(address, SessionAddress, transport)
    if found.transport != transport:
        raise TransferError(f"this is an address of {found.transport!r}, not of {transport!r}")
    if found.version != version:
        raise VersionMismatch(
            f"{transport}: we speak version {version}, the peer {found.version}; "
            "run one release of mooncake-hal on both"
        )
    return found


def _listen(options: EndpointOptions, transport: str) -> tuple[socket.socket, str, int]:
    sock = open_listener(options, transport, BACKLOG)
    try:
        return sock, advertised_host(options, sock), sock.getsockname()[1]
    except ValueError:
        sock.close()
        raise


def _listen_locally() -> tuple[socket.socket, str, int]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    name = f"mooncake-hal-{secrets.token_hex(16)}"
    sock.bind(f"\0{name}")
    sock.listen(BACKLOG)
    return sock, name, 0


def open_socket(address: SessionAddress, seconds: float) -> socket.socket:
    """Connect a socket to where an endpoint accepts sessions.

    Raises:
        OSError: nothing listens there, or it does not reply in time.
        TransportUnavailable: no route leads there, or its name is unknown.
    """
    if address.port:
        try:
            return socket.create_connection((address.host, address.port), seconds)
        except (ConnectionError, TimeoutError):
            raise  # the host is reached, or may be: no other transport would do better
        except OSError as exc:
            where = f"{address.host}:{address.port}"
            raise TransportUnavailable(address.transport, f"no way to {where}: {exc}") from exc
    deadline = time.monotonic() + seconds
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(seconds)
    while True:
        try:
            sock.connect(f"\0{address.host}")
        except BlockingIOError:
            # Linux does not wait while too many others wait to be accepted.
            if time.monotonic() < deadline:
                time.sleep(BACKLOG_PAUSE_SECONDS)
                continue
            sock.close()
            raise TimeoutError("too many processes are connecting") from None
        except BaseException:
            sock.close()
            raise
        return sock


def _await_all(sessions: list[Session], timeout: float) -> list[Session]:
    """Wait until every session's peer has taken in what was sent, or is gone; returns the late."""
    deadline = time.monotonic() + timeout
    late = []
    for session, pong in [(session, session.ping()) for session in sessions]:
        try:
            pong.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            logger.warning("a peer did not confirm a revocation within %g s", timeout)
            late.append(session)
        except TransferError as exc:
            logger.debug("a peer left during a revocation: %s", exc)
    return late
