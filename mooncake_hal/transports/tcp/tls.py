"""TLS for the tcp transport, from its extra settings."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_hal.errors import AccessDenied, PeerLost, TransferTimeout

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

    def wrap_server(self, connection: socket.socket) -> socket.socket:
        """Shake hands as the accepting side; takes the connection over.

        Raises:
            AccessDenied: the client shows no certificate of our authority.
            PeerLost: the connection broke.
        """
        return _wrap(self.server, connection, None)

    def wrap_client(self, connection: socket.socket, host: str) -> socket.socket:
        """Shake hands as the connecting side; ``host`` must be in the server's certificate.

        Raises:
            AccessDenied: the server's certificate is not of our authority, or not for that host.
            PeerLost: the connection broke.
        """
        return _wrap(self.client, connection, host)


def _context(kind: int, extra: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(extra["tls_certificate"], extra["tls_key"])
    context.load_verify_locations(extra["tls_authority"])
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _wrap(context: ssl.SSLContext, connection: socket.socket, host: str | None) -> socket.socket:
    try:
        return context.wrap_socket(connection, server_side=host is None, server_hostname=host)
    except ssl.SSLError as exc:
        raise AccessDenied(f"tcp: TLS refused: {exc}") from exc
    except TimeoutError as exc:
        raise TransferTimeout("tcp: the peer does not answer the TLS handshake in time") from exc
    except OSError as exc:
        raise PeerLost(f"tcp: the connection broke during the TLS handshake: {exc}") from exc
