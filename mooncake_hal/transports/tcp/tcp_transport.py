"""The tcp transport: its endpoints, and the server through which peers read and write regions."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

from mooncake_hal import native
from mooncake_hal.errors import (
    NativeUnavailable,
    PeerLost,
    TransferError,
    TransportUnavailable,
    VersionMismatch,
)
from mooncake_hal.hal_env import transport_settings
from mooncake_hal.session import authentication
from mooncake_hal.session.addressing import (
    advertised_host,
    host_identity,
    is_loopback,
    open_listener,
)
from mooncake_hal.session.authentication import Credentials
from mooncake_hal.session.listener import Listener, ProvenSocket, dial, hang_up
from mooncake_hal.session.regions import RegionTable
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports.tcp.interpreted_streams import InterpretedStreams
from mooncake_hal.transports.tcp.native_streams import NativeStreams, StreamOutcome, Streams
from mooncake_hal.transports.tcp.tcp_peer import Dial, PeerConnection, TcpPeer
from mooncake_hal.transports.tcp.tcp_sockets import (
    NAME,
    SETTINGS,
    VERSION,
    TcpAddress,
    Tls,
    limit_calls,
    tune_within_host,
)

logger = logging.getLogger(__name__)

BACKLOG = 256


class StreamServer:
    """Accepts connections and serves reads and writes of authenticated peers.

    Args:
        sock: a listening socket; closed with the server.
        streams: moves the bytes.
        credentials, epoch: credentials of the handshake, and this endpoint's epoch.
        tls: TLS contexts, or None.

    Raises:
        TransferError: its thread can't be started.
    """

    def __init__(
        self,
        sock: socket.socket,
        streams: Streams,
        credentials: Credentials,
        epoch: bytes,
        tls: Tls | None,
    ) -> None:
        self._streams = streams
        self._stop = ctypes.c_int32(0)
        self._lock = threading.Lock()
        self._served: set[socket.socket] = set()
        self._handle = streams.new_server()
        context = None if tls is None else tls.server
        try:
            self._listener = Listener(sock, credentials, epoch, self._serve, tls=context)
        except TransferError:
            streams.free_server(self._handle)
            raise

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the listening thread, if any."""
        return self._listener.error

    def set_regions(self, table: RegionTable) -> None:
        """Serve exactly the regions that ``table`` has now."""
        self._streams.set_regions(self._handle, table)

    def fence(self, start: int, end: int) -> None:
        """Abort all requests that touch [start, end); returns once none does any more."""
        self._streams.fence(self._handle, start, end)

    def close(self) -> None:
        """Close every connection and join every thread."""
        self._stop.value = 1
        with self._lock:
            for connection in self._served:
                hang_up(connection)
        self._listener.close()
        self._streams.free_server(self._handle)

    def _serve(self, proven: ProvenSocket) -> None:
        connection = proven.sock
        with self._lock:
            if self._stop.value:
                return
            self._served.add(connection)
        try:
            limit_calls(connection)
            tune_within_host(connection)
            outcome = self._streams.serve(self._handle, connection, self._stop)
            if outcome == StreamOutcome.BROKEN:
                logger.warning("tcp: closed a connection whose client broke the protocol")
        except OSError as exc:
            logger.debug("tcp: a client left: %s", exc)
        finally:
            with self._lock:
                self._served.discard(connection)


class TcpEndpoint:
    """A tcp endpoint: its registered regions, the server for them, and its peers."""

    def __init__(self, options: EndpointOptions, streams: Streams, tls: Tls | None) -> None:
        self._options = options
        self._streams = streams
        self._tls = tls
        self._credentials = Credentials(options.secret, NAME, VERSION)
        self._table = RegionTable("this side")
        self._lock = threading.Lock()
        self._next_key = 1
        self._closed = False
        self._peers: set[TcpPeer] = set()
        epoch = authentication.fresh_epoch()
        listener = open_listener(options, NAME, BACKLOG)
        try:
            self._address = authentication.encode(
                _own_address(options, epoch, listener, tls=tls is not None)
            )
        except BaseException:
            listener.close()
            raise
        self._server = StreamServer(listener, streams, self._credentials, epoch, tls)

    @property
    def transport(self) -> str:
        return NAME

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def variants(self) -> tuple[str, ...]:
        return (str(VERSION) if self._tls is None else f"{VERSION} tls",)

    def register(self, region: MemoryRegion) -> int:
        if region.device != "cpu":
            raise TransportUnavailable(NAME, f"it can't reach memory of {region.device}")
        with self._lock:
            self._check_open()
            key, self._next_key = self._next_key, self._next_key + 1
            self._table.add(key, region)
            self._server.set_regions(self._table)
        return key

    def revoke(self, key: int) -> None:
        with self._lock:
            self._check_open()
            region = self._table.revoke(key)
            self._server.set_regions(self._table)
            peers = list(self._peers)
        for peer in peers:
            peer.forget_local(key)
        self._server.fence(region.address, region.address + region.nbytes)

    def connect(self, address: bytes, *, timeout: float) -> TcpPeer:
        with self._lock:
            self._check_open()
        wanted = authentication.decode_address(address, TcpAddress, NAME)
        reason = unreachable_reason(wanted, tls=self._tls is not None)
        if reason is not None:
            raise TransportUnavailable(NAME, reason)

        def dial(seconds: float) -> socket.socket:
            return self._dial(wanted, seconds)

        # The first connection is opened here, to find out whether the peer is reachable; the others
        # are opened when they are needed.
        socks: list[socket.socket | None] = [dial(timeout)]
        socks += [None] * (self._options.connections - 1)
        peer = TcpPeer(self._connections(dial, socks), self._table, self._peers.discard)
        with self._lock:
            if not self._closed:
                self._peers.add(peer)
                return peer
        peer.close()
        raise PeerLost("tcp: this endpoint is closed")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers)
        for peer in peers:
            peer.close()
        self._server.close()

    def _check_open(self) -> None:
        if self._server.error is not None:
            raise TransferError("tcp: the listening thread failed") from self._server.error
        if self._closed:
            raise PeerLost("tcp: this endpoint is closed")

    def _connections(
        self, dial: Dial, socks: Sequence[socket.socket | None]
    ) -> list[PeerConnection]:
        """Create a connection with its thread for each socket; None is opened later.

        Raises:
            TransferError: a thread could not be started; all sockets are closed then.
        """
        connections: list[PeerConnection] = []
        with ExitStack() as undo:
            for sock in socks:
                if sock is not None:
                    undo.callback(sock.close)
            for at, sock in enumerate(socks):
                name = f"mooncake-tcp-connection-{at}"
                try:
                    connections.append(PeerConnection(self._streams, dial, sock, name))
                except RuntimeError as exc:
                    message = f"tcp: a connection's thread can't be started: {exc}"
                    raise TransferError(message) from exc
                undo.callback(connections[-1].close)
            undo.pop_all()
        return connections

    def _dial(self, address: TcpAddress, seconds: float) -> socket.socket:
        """Open and authenticate one connection. Raises TransferError."""

        def open_socket(timeout: float) -> socket.socket:
            connection = socket.create_connection((address.host, address.port), timeout)
            return (
                connection if self._tls is None else self._tls.wrap_client(connection, address.host)
            )

        where = f"{address.host} port {address.port}"
        connection = dial(open_socket, where, self._credentials, address.epoch, seconds).sock
        try:
            limit_calls(connection)
            tune_within_host(connection)
        except OSError as exc:
            connection.close()
            raise PeerLost(f"tcp: can't connect to {where}: {exc}") from exc
        return connection


def unreachable_reason(address: TcpAddress, *, tls: bool) -> str | None:
    """Return why an address can't be reached from this process, or None if it can."""
    if address.version != VERSION:
        raise VersionMismatch(
            f"tcp: we speak version {VERSION}, the peer {address.version}; "
            "run one release of mooncake-hal on both"
        )
    if is_loopback(address.host) and address.machine != host_identity():
        return (
            f"the peer listens on {address.host} of another host; configure it to listen on an "
            "address that other hosts can reach"
        )
    if address.tls != tls:
        return "one side uses TLS, the other does not; give both the tls_* settings"
    return None


def _own_address(
    options: EndpointOptions, epoch: bytes, listener: socket.socket, *, tls: bool
) -> TcpAddress:
    advertised = advertised_host(options, listener)
    return TcpAddress(
        version=VERSION,
        epoch=epoch,
        host=advertised,
        port=listener.getsockname()[1],
        machine=host_identity(),
        tls=tls,
    )


class TcpTransport:
    """Reads and writes over TCP connections: the default transport, which reaches any host.

    Args:
        streams: moves the bytes; None: NativeStreams if they can be compiled.
    """

    name = NAME
    can_revoke = True
    stops_writes_on_failure = False  # bytes in both ends' socket buffers are still received

    def __init__(self, streams: Streams | None = None) -> None:
        self._given = streams

    def open(self, options: EndpointOptions) -> TcpEndpoint:
        """``options.extra``, or else MOONCAKE_HAL_TCP, may have the TLS files; see
        ``Tls.from_settings``.

        Raises:
            ValueError: a setting is unknown, missing or out of range.
            HalError: MOONCAKE_HAL_TCP has an unknown setting.
        """
        unknown = sorted(set(options.extra) - set(SETTINGS))
        if unknown:
            raise ValueError(f"tcp has no settings {unknown}; it has {list(SETTINGS)}")
        if options.connections < 1:
            raise ValueError(f"connections must be 1 or more, got {options.connections}")
        tls = Tls.from_settings({**transport_settings(NAME, SETTINGS), **options.extra})
        streams = InterpretedStreams() if tls is not None else self._streams
        return TcpEndpoint(options, streams, tls)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        try:
            ours = authentication.decode_address(local, TcpAddress, self.name)
            theirs = authentication.decode_address(remote, TcpAddress, self.name)
        except TransferError as exc:
            return str(exc)
        if ours.version != theirs.version:
            return f"one end speaks version {ours.version}, the other {theirs.version}"
        if ours.tls != theirs.tls:
            return "one side uses TLS, the other does not"
        if is_loopback(theirs.host) and ours.machine != theirs.machine:
            return f"the peer listens on {theirs.host} of another host"
        return None

    @cached_property
    def _streams(self) -> Streams:
        if self._given is not None:
            return self._given
        try:
            return NativeStreams()
        except NativeUnavailable as exc:
            native.warn_fallback("tcp_stream", "sockets of the interpreter", exc.reason)
            return InterpretedStreams()


def load() -> TcpTransport:
    """Construct the transport, with compiled code if possible."""
    return TcpTransport()


def load_interpreted() -> TcpTransport:
    """Construct the transport without compiled code, as on a host without a compiler."""
    return TcpTransport(InterpretedStreams())
