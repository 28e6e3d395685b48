"""Entry point. Standard library only, because every process that lists transports imports it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Register the link. With a negative priority it must be requested by name; it uses no port."""
    return TransportSpec("mylink", API_VERSION, -1, probe, load, num_ports=0)


def probe() -> Availability:
    """Check the platform, without importing or initialising anything."""
    if not sys.platform.startswith("linux"):
        return Availability(False, f"needs Linux, this is {sys.platform}")
    return Availability(True, "every process of this host")


def load() -> Transport:
    """Construct the transport. Only this imports numpy and the vendor's library."""
    from mylink.mylink_transport import MyLinkTransport

    return MyLinkTransport()
