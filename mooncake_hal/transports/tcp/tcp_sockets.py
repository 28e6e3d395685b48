"""Addresses, socket options and TLS of the tcp transport. See stream.c for its protocol."""

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
from mooncake_hal.session.listener import run_tls_handshake

logger = logging.getLogger(__name__)

NAME = "tcp"
VERSION = 4
SLICE_SECONDS = 0.05
"""Longest time that a system call on a connection may block: stop flags are checked this often."""

LOOPBACK_CONGESTION_CONTROL = b"reno"
"""Congestion control within a host, where nothing is congested: algorithms that pace and probe
halve the speed (2.5 instead of 5 GB/s)."""
LOOPBACK_SEND_BUFFER = 384 << 10
"""Send buffer in bytes for connections within a host. By default, the kernel queues megabytes when
the receiver falls behind. On cores with 2 MiB of private cache, these are then read from outside
the cache: 3.7 instead of 6.5 GB/s, for as long as the connection lasts. Half this size makes pieces
of 4 KiB a sixth slower."""


class TcpAddress(msgspec.Struct, frozen=True, tag="tcp", forbid_unknown_fields=True):
    """The published address of an endpoint.

    Args:
        version: version of the protocol.
        epoch: random identity of this endpoint; a restarted one has another.
        host, port: address that it listens on.
        machine: identity of the host, which tells whether a loopback address is reachable.
        tls: whether it uses TLS.
    """

    version: int
    epoch: bytes
    host: str
    port: int
    machine: str
    tls: bool = False


def limit_calls(connection: socket.socket) -> None:
    """Make system calls on a connection return after SLICE_SECONDS at most. Raises OSError."""
    connection.settimeout(None)
    slice_ = struct.pack("ll", 0, int(SLICE_SECONDS * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, slice_)


def tune_within_host(connection: socket.socket) -> None:
    """Set congestion control and send buffer of a connection within a host; connections to other
    hosts are left unchanged."""
    if connection.getpeername()[0] != connection.getsockname()[0]:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_SEND_BUFFER)
    with contextlib.suppress(OSError):  # not built in or not permitted: slower, but still correct
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOOPBACK_CONGESTION_CONTROL
        )


SETTINGS = ("tls_certificate", "tls_key", "tls_authority")


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS contexts for mutual authentication: each side needs a certificate that the authority
    signed.

    Args:
        server, client: contexts for accepted and for outgoing connections.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def from_settings(cls, extra: Mapping[str, str]) -> Tls | None:
        """Create the contexts from ``tls_certificate``, ``tls_key`` and ``tls_authority``, which
        are paths of PEM files.

        Returns:
            None if none of them is set.

        Raises:
            ValueError: only some of them are set, or a file can't be used.
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
        """Run the TLS handshake as the client; ``host`` must be in the server's certificate.

        Takes ownership of the connection, whose timeout applies to the handshake.

        Raises:
            AccessDenied, TransferTimeout, PeerLost: see ``run_tls_handshake``.
        """
        wrapped = self.client.wrap_socket(
            connection, server_hostname=host, do_handshake_on_connect=False
        )
        try:
            run_tls_handshake(wrapped)
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
