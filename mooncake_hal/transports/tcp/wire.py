"""Addresses, sockets and the handshake of the tcp transport. See stream.c for what follows it."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import struct

import msgspec

from mooncake_hal.errors import PeerLost, TransferError, TransferTimeout
from mooncake_hal.transports import handshake

logger = logging.getLogger(__name__)

NAME = "tcp"
VERSION = 2
MAX_HANDSHAKE_BYTES = 4096
SLICE_SECONDS = 0.05
"""How long one system call on a connection may block: how soon stop flags are seen."""

DEAD_HOST_SECONDS = 60
"""After how long without a word from the other host an idle connection is given up."""

LOOPBACK_CONGESTION_CONTROL = b"reno"
"""Within a host nothing is congested; pacing and probing halve the speed (2.5 against 5 GB/s)."""


class Address(msgspec.Struct, frozen=True, tag="tcp", forbid_unknown_fields=True):
    """What an endpoint publishes.

    Args:
        version: of the protocol.
        epoch: random identity of this incarnation.
        host, port: where it listens.
        machine: the running kernel's identity, by which a loopback address means something.
        tls: whether it speaks TLS.
    """

    version: int
    epoch: bytes
    host: str
    port: int
    machine: str
    tls: bool = False


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from its own host."""
    return ipaddress.ip_address(host).is_loopback


def tune(connection: socket.socket) -> None:
    """Set a connected socket up for bulk transfers in slices of SLICE_SECONDS."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, DEAD_HOST_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, DEAD_HOST_SECONDS // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_HOST_SECONDS * 1000)
    connection.settimeout(None)
    slice_ = struct.pack("ll", 0, int(SLICE_SECONDS * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, slice_)


def choose_congestion_control(connection: socket.socket) -> None:
    """Within a host, take the congestion control that does not pace; leave others' as it is."""
    if connection.getpeername()[0] != connection.getsockname()[0]:
        return
    with contextlib.suppress(OSError):  # not built in or not allowed: slower, still right
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOOPBACK_CONGESTION_CONTROL
        )


def send_message(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a handshake message.

    Raises:
        PeerLost: the connection is gone.
        TransferTimeout: the peer does not take it.
    """
    data = handshake.encode(message)
    try:
        connection.sendall(struct.pack("<I", len(data)) + data)
    except OSError as exc:
        raise _gone(exc) from exc


def receive_message(connection: socket.socket, kind: type[handshake.Message]) -> handshake.Message:
    """Receive a handshake message.

    Raises:
        PeerLost: the connection is gone, or says something else.
        TransferTimeout: it is silent for its timeout.
    """
    (size,) = struct.unpack("<I", _receive_exactly(connection, 4))
    if size > MAX_HANDSHAKE_BYTES:
        raise PeerLost(f"tcp: the peer broke the protocol: a handshake of {size} bytes")
    return handshake.decode(_receive_exactly(connection, size), kind)


def hang_up(connection: socket.socket) -> None:
    """End the conversation, so that whoever is blocked on it returns; keeps the descriptor."""
    with contextlib.suppress(OSError):  # already ended
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = connection.recv(size)
        except OSError as exc:
            raise _gone(exc) from exc
        if not part:
            raise PeerLost("tcp: the peer closed the connection during the handshake")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _gone(error: OSError) -> TransferError:
    if isinstance(error, TimeoutError):
        return TransferTimeout("tcp: the peer does not answer the handshake in time")
    return PeerLost(f"tcp: the connection broke during the handshake: {error}")
