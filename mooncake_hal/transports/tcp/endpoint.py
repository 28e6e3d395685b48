"""A tcp endpoint: its regions, its server, its peers."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from pathlib import Path

from mooncake_hal.errors import (
    PeerLost,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
    VersionMismatch,
)
from mooncake_hal.transport import EndpointOptions, MemoryRegion
from mooncake_hal.transports import handshake
from mooncake_hal.transports.listening import advertised_host, open_listener
from mooncake_hal.transports.regions import RegionTable
from mooncake_hal.transports.tcp import wire
from mooncake_hal.transports.tcp.lanes import Lane
from mooncake_hal.transports.tcp.peer import TcpPeer
from mooncake_hal.transports.tcp.serving import Server
from mooncake_hal.transports.tcp.streams import Streams
from mooncake_hal.transports.tcp.tls import Tls

logger = logging.getLogger(__name__)

BACKLOG = 256


class TcpEndpoint:
    """See ``mooncake_hal.transport.Endpoint``."""

    def __init__(self, options: EndpointOptions, streams: Streams, tls: Tls | None) -> None:
        self._options = options
        self._streams = streams
        self._tls = tls
        self._deployment = handshake.Deployment(options.secret, wire.NAME, wire.VERSION)
        self._table = RegionTable("this side")
        self._lock = threading.Lock()
        self._next_key = 1
        self._closed = False
        self._peers: set[TcpPeer] = set()
        epoch = handshake.fresh_epoch()
        listener = open_listener(options, wire.NAME, BACKLOG)
        try:
            self._address = handshake.encode(
                _own_address(options, epoch, listener, tls=tls is not None)
            )
        except BaseException:
            listener.close()
            raise
        self._server = Server(listener, streams, self._deployment, epoch, tls)

    @property
    def transport(self) -> str:
        """See ``Endpoint``."""
        return wire.NAME

    @property
    def address(self) -> bytes:
        """See ``Endpoint``."""
        return self._address

    def register(self, region: MemoryRegion) -> int:
        """See ``Endpoint``.

        Raises:
            TransportUnavailable: the region is not in host memory.
        """
        if region.device != "cpu":
            raise TransportUnavailable(wire.NAME, f"it can't reach memory of {region.device}")
        with self._lock:
            self._check_open()
            key, self._next_key = self._next_key, self._next_key + 1
            self._table.add(key, region)
            self._server.set_regions(self._table)
        return key

    def revoke(self, key: int) -> None:
        """See ``Endpoint``.

        Raises:
            RegionUnknown, RegionRevoked: the key is no region's.
        """
        with self._lock:
            self._check_open()
            region = self._table.revoke(key)
            self._server.set_regions(self._table)
            peers = list(self._peers)
        for peer in peers:
            peer.forget_local(key)
        self._server.fence(region.address, region.address + region.nbytes)

    def connect(self, address: bytes, *, timeout: float) -> TcpPeer:
        """See ``Endpoint``.

        Raises:
            TransferTimeout: the peer's host does not answer.
        """
        with self._lock:
            self._check_open()
        wanted = handshake.decode_address(address, wire.Address, wire.NAME)
        reason = out_of_reach(wanted, tls=self._tls is not None)
        if reason is not None:
            raise TransportUnavailable(wire.NAME, reason)

        def dial(seconds: float) -> socket.socket:
            return self._dial(wanted, seconds)

        connections: list[socket.socket | None] = [dial(timeout)]
        connections += [None] * (self._options.connections - 1)
        lanes = [
            Lane(self._streams, dial, connection, f"mooncake-tcp-lane-{at}")
            for at, connection in enumerate(connections)
        ]
        peer = TcpPeer(lanes, self._table, self._peers.discard)
        with self._lock:
            if not self._closed:
                self._peers.add(peer)
                return peer
        peer.close()
        raise PeerLost("tcp: this endpoint is closed")

    def close(self) -> None:
        """See ``Endpoint``."""
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

    def _dial(self, address: wire.Address, seconds: float) -> socket.socket:
        """Open one connection and prove who we are. Raises TransferError."""
        where = f"{address.host} port {address.port}"
        if seconds <= 0:
            raise TransferTimeout(f"tcp: no time left to connect to {where}")
        connection = None
        try:
            connection = socket.create_connection((address.host, address.port), seconds)
            if self._tls is not None:
                connection = self._tls.wrap_client(connection, address.host)
            self._shake_hands(connection, address)
            wire.tune(connection)
            wire.choose_congestion_control(connection)
        except BaseException as exc:
            if connection is not None:
                connection.close()
            if isinstance(exc, TimeoutError):
                raise TransferTimeout(f"tcp: {where} does not answer in {seconds:g} s") from exc
            if isinstance(exc, OSError):
                raise PeerLost(f"tcp: can't connect to {where}: {exc}") from exc
            raise
        return connection

    def _shake_hands(self, connection: socket.socket, address: wire.Address) -> None:
        challenge = wire.receive_message(connection, handshake.Challenge)
        hello = self._deployment.answer(challenge, address.epoch)
        wire.send_message(connection, hello)
        welcome = wire.receive_message(connection, handshake.Welcome)
        self._deployment.check_server(challenge, hello, welcome)


def machine_identity() -> str:
    """Name the running kernel and its network namespace, in which loopback addresses live."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').readlink()}"


def out_of_reach(address: wire.Address, *, tls: bool) -> str | None:
    """Say why an address can't be reached from this process, or None."""
    if address.version != wire.VERSION:
        raise VersionMismatch(
            f"tcp: we speak version {wire.VERSION}, the peer {address.version}; "
            "run one release of mooncake-hal on both"
        )
    if wire.is_loopback(address.host) and address.machine != machine_identity():
        return (
            f"the peer listens on {address.host} of another host; let it listen on a real address"
        )
    if address.tls != tls:
        return "one side uses TLS, the other does not; give both the tls_* settings"
    return None


def _own_address(
    options: EndpointOptions, epoch: bytes, listener: socket.socket, *, tls: bool
) -> wire.Address:
    host, port = listener.getsockname()[:2]
    advertised = advertised_host(options, listener)
    if not ipaddress.ip_address(host).is_loopback and not options.secret:
        logger.warning(
            "tcp: listening on %s without a secret: any host that connects is let in", host
        )
    return wire.Address(
        version=wire.VERSION,
        epoch=epoch,
        host=advertised,
        port=port,
        machine=machine_identity(),
        tls=tls,
    )
