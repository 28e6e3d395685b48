"""What transports listen on: a port, or the first free one of a range, and how peers name it."""

from __future__ import annotations

import errno
import ipaddress
import socket

from mooncake_hal.errors import PortsExhausted
from mooncake_hal.transport import EndpointOptions


def open_listener(options: EndpointOptions, transport: str, backlog: int) -> socket.socket:
    """Return a listening socket at ``options.port``, or the first free port of its range.

    Args:
        options: of the endpoint.
        transport: for messages.
        backlog: connections that may wait to be accepted.

    Raises:
        OSError: the host or port can't be bound.
        PortsExhausted: every port of the range is taken.
    """
    if options.port or options.port_range is None:
        return _listen(options.host, options.port, backlog)
    for port in options.port_range:
        try:
            return _listen(options.host, port, backlog)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
    raise PortsExhausted(
        f"{transport}: all ports of {options.port_range} are taken on {options.host}; every rank "
        "wants one for each transport that listens: widen the range, or free some"
    )


def advertised_host(options: EndpointOptions, listener: socket.socket) -> str:
    """Return the address that peers are told.

    Raises:
        ValueError: it listens on all addresses, and nobody says which one peers connect to.
    """
    host = str(listener.getsockname()[0])
    if options.advertise_host is None and ipaddress.ip_address(host).is_unspecified:
        raise ValueError(f"listening on {host}: say with advertise_host what peers connect to")
    return options.advertise_host or host


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # "::" takes the peers of IPv4 in, too
            is_only = not ipaddress.ip_address(address[0]).is_unspecified
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, is_only)
        listener.bind(address)
        # Only this makes the port ours: others with the option may bind it until somebody listens.
        listener.listen(backlog)
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, f"can't listen on {host} port {port}: {exc.strerror}") from exc
    return listener
