"""TLS contexts of the proxy, as a server and as a client of instances, from the files that its
options name."""

from __future__ import annotations

import logging
import ssl
import time
from datetime import datetime
from pathlib import Path

from mooncake_proxy.config import TlsConfig
from mooncake_proxy.errors import ConfigError

logger = logging.getLogger(__name__)
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_CERTIFICATE_END = b"-----END CERTIFICATE-----"
_UTC_TIME = 0x17
_KEY_ENDS = b"PRIVATE KEY-----"
_ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")


class ServerCertificate:
    """The proxy's certificate, which may be replaced while it serves.

    Args:
        config: names the files.

    Raises:
        ConfigError: a file can't be read, or is not what its option wants.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._config = config
        self.reload()
        # The context of the listeners. A certificate that is loaded into a context joins the one
        # that it has, if one is RSA and the other EC, and a key that does not fit leaves it without
        # any. So a new certificate comes in a new context.
        self.context = self._current
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Give the certificate that the files hold now to the connections that come from now on.

        Raises:
            ConfigError: it can't be used; the former one stays.
        """
        certificate, self._current = server_tls(self._config)
        # Unix time; None if it can't be read.
        self.not_after = expiry_of(certificate)
        if self.not_after is not None and self.not_after < time.time():
            logger.warning("--tls-cert %s: the certificate has expired", self._config.certificate)

    def _choose(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Called at each handshake, whether or not the client names a server."""
        connection.context = self._current


def server_tls(config: TlsConfig) -> tuple[bytes, ssl.SSLContext]:
    """The proxy's certificate, and a context with it.

    Raises:
        ConfigError: a file can't be read, or is not what its option wants.
    """
    assert config.certificate is not None
    certificate = _read("--tls-cert", config.certificate)
    if _CERTIFICATE not in certificate:
        raise ConfigError(f"--tls-cert {config.certificate}: wanted a certificate as PEM")
    if config.key is None:
        key, option = certificate, f"--tls-cert {config.certificate}"
    else:
        key, option = _read("--tls-key", config.key), f"--tls-key {config.key}"
    if _KEY_ENDS not in key:
        advice = "; give its file with --tls-key" if config.key is None else ""
        raise ConfigError(f"{option}: wanted a private key as PEM, found none{advice}")
    if any(mark in key for mark in _ENCRYPTED):
        raise ConfigError(f"{option}: wanted a private key that needs no passphrase")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.certificate, config.key)
    except OSError as exc:  # includes ssl.SSLError
        problem = f"wanted a certificate and its private key as PEM: {exc}"
        raise ConfigError(f"{option}: {problem}") from exc
    return certificate, context


def upstream_tls(config: TlsConfig) -> ssl.SSLContext | None:
    """The context of connections to instances; None: this host's CA certificates are trusted.

    Raises:
        ConfigError: the file of CA certificates can't be used.
    """
    if not config.upstream_verify:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if (ca := config.upstream_ca) is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as exc:  # includes ssl.SSLError
        raise ConfigError(f"--upstream-ca {ca}: wanted certificates as PEM: {exc}") from exc


def expiry_of(pem: bytes) -> float | None:
    """When the first certificate of a PEM file expires, as Unix time; None if it can't be read.

    Python's ssl tells that only of certificates of peers.
    """
    begin = pem.find(_CERTIFICATE)
    end = pem.find(_CERTIFICATE_END, begin) + len(_CERTIFICATE_END)
    try:
        der = ssl.PEM_cert_to_DER_cert(pem[begin:end].decode("ascii"))
        # X.509: the certificate holds a body, which holds its version, serial number, algorithm,
        # issuer, and then the time from which and the time until which it is valid.
        at = _element(der, _element(der, 0)[1])[1]
        for _ in range(4):
            at = _element(der, at)[2]
        _, _, at = _element(der, _element(der, at)[1])
        tag, start, end = _element(der, at)
        text = der[start:end].decode("ascii")
        if tag == _UTC_TIME:
            text = ("19" if text >= "50" else "20") + text
        return datetime.strptime(text, "%Y%m%d%H%M%S%z").timestamp()
    except (ValueError, IndexError):
        return None


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the DER element at ``at``, and where its content starts and ends."""
    length, start = der[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[at + 2 : start], "big")
    return der[at], start, start + length


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{option} {path}: wanted a PEM file: {exc.strerror}") from exc
