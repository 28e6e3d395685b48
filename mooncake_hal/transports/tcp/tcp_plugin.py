"""Offers the ``tcp`` transport, which connects any two hosts with a route between them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

PRIORITY = 10
"""The lowest priority that ``auto`` selects: tcp is used if nothing faster reaches the peer."""


def probe() -> Availability:
    """Check whether this host supports the transport."""
    if not sys.platform.startswith("linux") or sys.byteorder != "little":
        return Availability(False, f"needs little-endian Linux, this is {sys.platform}")
    return Availability(True)


def load() -> Transport:
    """Import and construct the transport."""
    from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp

    return load_tcp()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport."""
    return TransportSpec("tcp", API_VERSION, PRIORITY, probe, load)
