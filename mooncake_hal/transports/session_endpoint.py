"""A ready-made endpoint for transports: a transport author writes only the data path.

The endpoint implements the control plane, which is the same for every transport: authentication,
registration and revocation of regions, and the detection of lost peers. The data path registers
memory with its hardware or library, replies to peers' requests, and creates the peers that read and
write. A transport then consists of a ``DataPath``, a ``DataPathPeer``, and a ``Transport`` whose
``open`` calls ``open_endpoint`` and whose ``reaches`` calls ``compare_addresses``; see
``docs/examples/mylink``.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
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
from mooncake_hal.session.session import Session, reject_requests
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Peer

logger = logging.getLogger(__name__)

Facts = TypeVar("Facts")

BACKLOG = 64

BACKLOG_PAUSE_SECONDS = 0.01

SharedFd = Callable[[MemoryRegion], "int | None"]
"""Returns the descriptor to send to peers with a region, or None."""

REVOKE_SECONDS = 1.0
"""Timeout of revoke() for connected peers to confirm; the data path has ended their access by
then."""

CLOSE_SECONDS = 5.0
"""Timeout of close() for peers that access our memory directly to confirm that they stopped."""


class SessionAddress(
    msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True
):
    """The published address of an endpoint.

    Args:
        transport: name of the transport.
        version: version of its protocol.
        epoch: identity of this endpoint; a restarted one has another.
        host: host that accepts sessions; for a Unix socket, its abstract name.
        port: the TCP port; 0 for a Unix socket.
        info: data by which the data path decides whether a peer is reachable, in its own encoding.
    """

    transport: str
    version: int
    epoch: bytes
    host: str
    port: int
    info: bytes


class DataPathPeer(Peer, Protocol):
    """A peer whose endpoint notifies it when its session ends."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        ...

    def lost(self, error: TransferError) -> None:
        """Called when the session is over: fail and drain all transfers. Idempotent; any thread.

        Requests over the session have failed by then; a peer that waits for nothing else can
        inherit this default, which does nothing.
        """
        return


class DataPath(Protocol):
    """The part of an endpoint that moves bytes; besides its peers, all that a transport implements.

    Methods may be called from any thread and concurrently, but never concurrently for one key. The
    order is: ``info`` once; ``attach`` and ``detach`` per region, ``connect`` per peer that we
    connect to, ``handle_request`` and ``session_ended`` per peer that connected to us; ``close``
    last.
    """

    @property
    def name(self) -> str:
        """Name of the transport."""
        ...

    @property
    def version(self) -> int:
        """Version of the data path's protocol."""
        ...

    def info(self) -> bytes:
        """Return what a peer needs to decide whether it can reach us, and to connect. It is part of
        the published address.

        The address is not secret, so nothing in it may give access to memory.
        """
        ...

    def unreachable_reason(self, info: bytes) -> str | None:
        """Return why the peer that published ``info`` can't be reached, or None if it can.

        Raises:
            TransferError: ``info`` is not of this data path.
        """
        ...

    def attach(self, key: int, region: MemoryRegion) -> bytes:
        """Register memory; returns its "attachment": what a peer needs to access it.

        The endpoint sends the attachment to every peer that has proved itself, where it is in
        ``Session.regions``.

        Raises:
            TransferError: the hardware or library rejects the memory.
        """
        ...

    def detach(self, key: int) -> None:
        """Deregister memory, which has already been removed from the local table.

        Once this returns, our own transfers of the region have completed or failed, and so have
        peers' transfers if the transport can revoke. The peers have been sent a notice before.
        """
        ...

    def handle_request(self, session: Session, payload: bytes) -> bytes:
        """Reply to a request of a peer that connected to us; runs on its session's thread.

        Raises:
            HalError: the request is rejected; the peer receives the message.
        """
        ...

    def session_ended(self, session: Session) -> None:
        """Called when a peer that connected to us is gone: release any resources held for it."""
        return

    def connect(self, session: Session, info: bytes, timeout: float) -> DataPathPeer:
        """Create a peer on top of a new session, which the peer owns and closes.

        ``session.regions`` already has every region that the other end had registered.

        Args:
            session: the authenticated session to the other end.
            info: the ``info`` that the other end published.
            timeout: timeout of the whole call, in seconds.

        Raises:
            TransferError: the peer can't be created; the endpoint closes the session then.
        """
        ...

    def close(self) -> None:
        """Release remaining resources; all peers, sessions and regions are closed already."""
        return


class SessionEndpoint:
    """The control plane around one data path; created by ``open_endpoint``."""

    def __init__(
        self,
        data_path: DataPath,
        local: AttachedRegions,
        options: EndpointOptions,
        *,
        shared_fd: SharedFd | None = None,
        confirm_s: float | None = None,
        variants: Sequence[str] | None = None,
    ) -> None:
        self._data_path = data_path
        self._variants = (str(data_path.version),) if variants is None else tuple(variants)
        self._local = local
        self._confirm_s = confirm_s
        self._live: dict[int, Registered] = {}
        self._shared_fd = shared_fd
        self._fds: dict[int, int | None] = {}
        self._next_key = 0
        self._lock = threading.RLock()  # also held while sending announcements, to keep their order
        self._inbound: set[Session] = set()
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

    @property
    def variants(self) -> tuple[str, ...]:
        return self._variants

    def register(self, region: MemoryRegion) -> int:
        with self._lock:
            self._require_open()
            self._local.check_can_add(region)
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
            # before the memory is gone, so that whoever fails to access it knows why; and to those
            # peers alone that know the region
            dropped = self._announce(Revoked(key))
            inbound = [session for session in self._inbound if session not in dropped]
        self._data_path.detach(key)
        late = dropped + _await_all(inbound, self._confirm_s or REVOKE_SECONDS)
        if late and self._confirm_s is not None:
            raise TransferTimeout(
                f"{self.transport}: a peer did not confirm the revocation of region {key} within "
                f"{self._confirm_s:g} s; its process may be stopped. End it before the memory is "
                "reused"
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
        session = Session(proven, reject_requests)
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
            peers, inbound = list(self._peers), list(self._inbound)
            keys, self._live = list(self._live), {}
            if self._confirm_s is not None:
                for key in keys:
                    self._announce(Revoked(key))
        for peer in peers:
            peer.close()
        if self._confirm_s is not None:
            _await_all(inbound, CLOSE_SECONDS)
        for session in inbound:
            session.close()
        self._listener.close()
        for key in keys:
            self._local.revoke(key)
            self._data_path.detach(key)
        self._data_path.close()

    def _serve(self, proven: ProvenSocket) -> None:
        """Serve one peer's session, from the end of its handshake to its close."""
        session = Session(proven, self._data_path.handle_request)
        try:
            with self._lock:
                if self._closed:
                    return
                self._inbound.add(session)
                for message in self._live.values():
                    self._send(session, message)
            session.run()
        except PeerLost as exc:
            logger.debug("a peer left while it was sent the registered regions: %s", exc)
        finally:
            with self._lock:
                self._inbound.discard(session)
            self._data_path.session_ended(session)
            session.close()

    def _announce(self, message: Registered | Revoked) -> list[Session]:
        """Send a message to every connected peer. Peers that do not accept it are dropped and
        returned, unless they had hung up themselves."""
        dropped = []
        for session in list(self._inbound):
            try:
                self._send(session, message)
            except PeerLost as exc:
                if not session.is_hung_up():
                    logger.warning("%s: dropping a peer: %s", self.transport, exc)
                    dropped.append(session)
                session.hang_up()
        return dropped

    def _send(self, session: Session, message: Registered | Revoked) -> None:
        fd = self._fds.get(message.key) if isinstance(message, Registered) else None
        session.send(message, fd)

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
    variants: Sequence[str] | None = None,
) -> SessionEndpoint:
    """Open the endpoint of a data path; closes the data path if that fails.

    Args:
        data_path: moves the bytes; owned by the endpoint.
        local: the table in which the data path looks up local addresses; the endpoint fills it.
        options: how to open the endpoint.
        shared_fd: for data paths between processes of one host: sessions are accepted on a Unix
            socket, and this returns the descriptor to send to peers with a region. None: sessions
            are accepted on TCP.
        confirm_s: for data paths whose peers access our memory directly: ``revoke`` waits up to
            this many seconds until every peer has confirmed that it stopped, and fails if one does
            not. None if the data path itself ends all access.
        variants: see ``Endpoint.variants``; None: the version of the data path.

    Raises:
        OSError, PortsExhausted, ValueError: see ``Transport.open``.
    """
    try:
        return SessionEndpoint(
            data_path,
            local,
            options,
            shared_fd=shared_fd,
            confirm_s=confirm_s,
            variants=variants,
        )
    except BaseException:
        data_path.close()
        raise


def compare_addresses(
    addresses: tuple[bytes, bytes],
    transport: str,
    version: int,
    decode: Callable[[bytes], Facts],
    unreachable_reason: Callable[[Facts, Facts], str | None],
) -> str | None:
    """Implementation of ``Transport.reaches``: returns why the endpoints with two published
    addresses can't reach each other, or None.

    Args:
        addresses: ours and the peer's.
        transport, version: the transport and protocol version that both must have.
        decode: decodes an address's ``info``; raises TransferError if it is invalid.
        unreachable_reason: compares the decoded infos; returns why they can't reach each other, or
            None.
    """
    try:
        ours, theirs = (read_address(address, transport, version) for address in addresses)
        return unreachable_reason(decode(ours.info), decode(theirs.info))
    except TransferError as exc:
        return str(exc)


def read_address(address: bytes, transport: str, version: int) -> SessionAddress:
    """Decode a published address.

    Raises:
        TransferError: it is no address of this transport.
        VersionMismatch: it is an address of another protocol version.
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
    """Connect a socket to the address at which an endpoint accepts sessions.

    Raises:
        OSError: no process listens there, or it does not reply in time.
        TransportUnavailable: there is no route to the host, or its name is unknown.
    """
    if address.port:
        try:
            return socket.create_connection((address.host, address.port), seconds)
        except (ConnectionError, TimeoutError):
            raise  # the host is or may be reachable: another transport would not help
        except OSError as exc:
            where = f"{address.host}:{address.port}"
            raise TransportUnavailable(address.transport, f"can't reach {where}: {exc}") from exc
    deadline = time.monotonic() + seconds
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    sock.settimeout(seconds)
    while True:
        try:
            sock.connect(f"\0{address.host}")
        except BlockingIOError:
            # On Linux, connect() to a full backlog fails instead of waiting.
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
    """Wait until every session's peer has processed all messages sent to it, or is gone; returns
    the sessions that did not confirm in time."""
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
