"""What shm endpoints say to each other, over a Unix socket that keeps message boundaries.

The bytes of KV never take this way. It carries the handshake, the regions with their descriptors,
and revocations with their acknowledgements; and its end is how the death of a process is seen.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import NamedTuple

import msgspec

from mooncake_hal.errors import PeerLost, TransferTimeout
from mooncake_hal.transports.handshake import UNREADABLE, encode

NAME = "shm"
VERSION = 1
MAX_MESSAGE = 64 * 1024
SEND_SECONDS = 5.0


class Address(msgspec.Struct, frozen=True, tag="shm", forbid_unknown_fields=True):
    """What an endpoint publishes.

    Args:
        version: of the protocol.
        host: see ``host_identity``.
        epoch: random identity of this incarnation.
        socket: name of the abstract Unix socket, without the leading zero byte.
        pid: the process, for messages; the kernel says which one really answers.
    """

    version: int
    host: str
    epoch: bytes
    socket: str
    pid: int


class Offer(msgspec.Struct, frozen=True, tag="offer", forbid_unknown_fields=True):
    """Server to client: a region. One descriptor rides along if it is mappable."""

    key: int
    address: int
    nbytes: int
    mappable: bool = False
    fd_offset: int = 0


class Revoke(msgspec.Struct, frozen=True, tag="revoke", forbid_unknown_fields=True):
    """Server to client: stop touching a region, then answer ``Revoked``."""

    key: int


class Revoked(msgspec.Struct, frozen=True, tag="revoked", forbid_unknown_fields=True):
    """Client to server: no more bytes of the region move."""

    key: int


class Sync(msgspec.Struct, frozen=True, tag="sync", forbid_unknown_fields=True):
    """Client to server: answer ``Synced`` after all that you have said so far."""

    token: int


class Synced(msgspec.Struct, frozen=True, tag="synced", forbid_unknown_fields=True):
    """Server to client, and once unasked (token 0) after the first regions.

    Args:
        token: the question's.
        probe: address of eight random bytes in the server's memory, in token 0 only.
        cookie: those bytes: a client that reads them reaches the right process.
    """

    token: int
    probe: int = 0
    cookie: bytes = b""


ToClient = Offer | Revoke | Synced
ToServer = Revoked | Sync


class Credentials(NamedTuple):
    """Who is at the other end of a Unix socket, as the kernel vouches for it."""

    pid: int
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    """Return the process at the other end, in this process's pid namespace (0 if outside it)."""
    size = struct.calcsize("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return Credentials(*struct.unpack("3i", data))


def new_socket(timeout: float | None = None) -> socket.socket:
    """Return an unconnected socket."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    made.settimeout(timeout)
    return made


def send(connection: socket.socket, message: msgspec.Struct, fd: int | None = None) -> None:
    """Send a message, with a descriptor if there is one.

    Raises:
        PeerLost: the connection is gone, or the peer has not read it for SEND_SECONDS.
    """
    data = encode(message)
    try:
        if fd is None:
            connection.send(data)
        else:
            socket.send_fds(connection, [data], [fd])
    except OSError as exc:
        raise PeerLost(f"shm: the peer's control connection is gone: {exc}") from exc


def hang_up(connection: socket.socket) -> None:
    """End the conversation; the descriptor stays open for whoever is selecting on it."""
    with contextlib.suppress(OSError):  # already ended, or never begun
        connection.shutdown(socket.SHUT_RDWR)


def receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message and the descriptors that came with it.

    Raises:
        PeerLost: the connection is gone, or sends too much.
        TransferTimeout: it is silent for its timeout.
    """
    try:
        data, fds, flags, _ = socket.recv_fds(connection, MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError as exc:
        raise TransferTimeout("shm: the peer does not answer in time") from exc
    except OSError as exc:
        raise PeerLost(f"shm: the peer's control connection is gone: {exc}") from exc
    if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            socket.close(fd)
        what = "sent a message that is too large" if data else "closed the connection"
        raise PeerLost(f"shm: the peer {what}")
    return data, fds


def decode_to_client(data: bytes) -> ToClient:
    """Read what a server says.

    Raises:
        PeerLost: it breaks the protocol.
    """
    try:
        return msgspec.msgpack.decode(data, type=Offer | Revoke | Synced)
    except UNREADABLE as exc:
        raise PeerLost(f"shm: the peer broke the protocol: {exc}") from exc


def decode_to_server(data: bytes) -> ToServer:
    """Read what a client says.

    Raises:
        PeerLost: it breaks the protocol.
    """
    try:
        return msgspec.msgpack.decode(data, type=Revoked | Sync)
    except UNREADABLE as exc:
        raise PeerLost(f"shm: the peer broke the protocol: {exc}") from exc
