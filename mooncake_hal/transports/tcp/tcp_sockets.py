"""Addresses and sockets of the tcp transport, TLS included. See stream.c for what follows."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from mooncake_hal.errors import TransferError
from mooncake_hal.session.listener import shake_hands_tls

logger = logging.getLogger(__name__)

NAME = "tcp"
VERSION = 4
SLICE_SECONDS = 0.05
"""How long one system call on a connection may block: how soon stop flags are seen."""

LOOPBACK_CONGESTION_CONTROL = b"reno"
"""Within a host nothing is congested; pacing and probing halve the speed (2.5 against 5 GB/s)."""
LOOPBACK_SEND_BUFFER = 384 << 10
"""Bytes under way within a host. The kernel lets megabytes wait where the receiver falls behind; on
cores with 2 MiB of their own cache they are read from behind it: 3.7 against 6.5 GB/s, for as long
as the connection lasts. Half as much makes pieces of 4 KiB a sixth slower."""


class TcpAddress(msgspec.Struct, frozen=True, tag="tcp", forbid_unknown_fields=True):
    """What an endpoint publishes.

    Args:
        version: of the protocol.
        epoch: random identity of this endpoint; a restarted one has another.
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


def limit_calls(connection: socket.socket) -> None:
    """Have system calls on a connection return after SLICE_SECONDS at most. Raises OSError."""
    connection.settimeout(None)
    slice_ = struct.pack("ll", 0, int(SLICE_SECONDS * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, slice_)


def tune_within_host(connection: socket.socket) -> None:
    """Within a host, neither pace nor run far ahead; connections to others stay as they are."""
    if connection.getpeername()[0] != connection.getsockname()[0]:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_SEND_BUFFER)
    with contextlib.suppress(OSError):  # not built in or not allowed: slower, still right
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOOPBACK_CONGESTION_CONTROL
        )


SETTINGS = ("tls_certificate", "tls_key", "tls_authority")


@dataclass(frozen=True, slots=True)
class Tls:
    """Contexts for both directions; each side shows a certificate that the authority signed.

    Args:
        server, client: contexts of the accepting and of the connecting side.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def from_settings(cls, extra: Mapping[str, str]) -> Tls | None:
        """Build it from ``tls_certificate``, ``tls_key`` and ``tls_authority``, paths of PEM files.

        Returns:
            None if none of them is set.

        Raises:
            ValueError: some are set and some are not, or a file can't be used.
        """
        given = [name for name in SETTINGS if name in extra]
        if not given:
            return None
        if len(given) < len(SETTINGS):
            raise ValueError(f"TLS needs all of {', '.join(SETTINGS)}; only {given} are set")
        try:
            return cls(
                _context(ssl.PROTOCOL_TLS_SERVER, extra), _context(ssl.PROTOCOL_TLS_CLIENT, extra)
            )
        except (OSError, ssl.SSLError) as exc:
            raise ValueError(f"can't use the TLS files {extra}: {exc}") from exc

    def wrap_client(self, connection: socket.socket, host: str) -> ssl.SSLSocket:
        """Shake hands as the connecting side; ``host`` must be in the server's certificate.

        Takes the connection over; its timeout bounds the handshake.

        Raises:
            AccessDenied, TransferTimeout, PeerLost: see ``shake_hands_tls``.
        """
        wrapped = self.client.wrap_socket(
            connection, server_hostname=host, do_handshake_on_connect=False
        )
        try:
            shake_hands_tls(wrapped)
        except TransferError:
            wrapped.close()
            raise
        return wrapped


def _context(kind: int, extra: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(extra["tls_certificate"], extra["tls_key"])
    context.load_verify_locations(extra["tls_authority"])
    context.verify_mode = ssl.CERT_REQUIRED
    return context
