"""Listening sockets and their addresses: which port is bound, and the address that peers use."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from mooncake_hal.errors import PortsExhausted
from mooncake_hal.transport import EndpointOptions


def open_listener(options: EndpointOptions, transport: str, backlog: int) -> socket.socket:
    """Return a socket that listens at ``options.port``, or at the first free port of the range.

    Args:
        options: the endpoint's options.
        transport: name of the transport, for messages.
        backlog: maximum number of connections that wait to be accepted.

    Raises:
        OSError: the host or port can't be bound.
        PortsExhausted: every port of the range is in use.
    """
    if options.port or options.port_range is None:
        return listen_on(options.host, options.port, backlog)
    return listen_on_first(options.host, options.port_range, backlog, transport)


def listen_on_first(host: str, ports: Iterable[int], backlog: int, protocol: str) -> socket.socket:
    """Return a socket that listens on the first free port of ``ports``; 0 means any port.

    Raises:
        OSError: the host or a port can't be bound.
        PortsExhausted: all of the ports are in use.
    """
    for port in ports:
        try:
            return listen_on(host, port, backlog)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
    raise PortsExhausted(
        f"{protocol}: all ports of {ports} are taken on {host}; every rank needs one for each "
        "listening transport: widen the range, or free some ports"
    )


def advertised_host(options: EndpointOptions, listener: socket.socket) -> str:
    """Return the address that peers connect to.

    Raises:
        ValueError: the socket listens on all addresses and ``advertise_host`` is not set, or other
            hosts can reach it and there is no secret.
    """
    host = str(listener.getsockname()[0])
    if not (options.secret or options.allow_no_secret or is_loopback(host)):
        raise ValueError(
            f"listening on {host} without a secret would accept every host that connects: set a "
            "secret, or set allow_no_secret if this is intended"
        )
    if options.advertise_host is None and ipaddress.ip_address(host).is_unspecified:
        raise ValueError(f"listening on {host}: set advertise_host to the address for peers")
    return options.advertise_host or host


def host_identity() -> str:
    """Return an identifier of the running kernel and network namespace, which is the scope of
    abstract Unix sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from its own host."""
    return ipaddress.ip_address(host).is_loopback


def listen_on(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on a host and port; raises OSError, which names both."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # "::" accepts IPv4 peers, too
            is_only = not ipaddress.ip_address(address[0]).is_unspecified
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, is_only)
        listener.bind(address)
        # Only listen() claims the port: until then, other sockets with SO_REUSEADDR may bind it.
        listener.listen(backlog)
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, f"can't listen on {host} port {port}: {exc.strerror}") from exc
    return listener
