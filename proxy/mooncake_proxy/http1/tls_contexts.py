"""TLS contexts of the proxy, as a server and as a client of instances, from the files that its
options name."""

from __future__ import annotations

import ssl
from pathlib import Path

from mooncake_proxy.config import TlsConfig
from mooncake_proxy.errors import ConfigError

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY_ENDS = b"PRIVATE KEY-----"
_ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")


def server_tls(config: TlsConfig) -> ssl.SSLContext | None:
    """The context with the proxy's certificate; None without one.

    Raises:
        ConfigError: a file can't be read, or is not what its option wants.
    """
    if config.certificate is None:
        return None
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
    except ssl.SSLError as exc:
        problem = f"wanted a certificate and its private key as PEM: {exc}"
        raise ConfigError(f"{option}: {problem}") from exc
    return context


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


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(f"{option} {path}: wanted a PEM file: {exc.strerror}") from exc
