"""Entry point; standard library only, because everybody who lists transports imports it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the link. Below zero, it has to be asked for; it listens on no port."""
    return TransportSpec("mylink", API_VERSION, -1, probe, load, num_ports=0)


def probe() -> Availability:
    """Look at files and installed modules; import nothing, initialise nothing."""
    if not sys.platform.startswith("linux"):
        return Availability(False, f"needs Linux, this is {sys.platform}")
    return Availability(True, "every process of this host")


def load() -> Transport:
    """Only here are numpy and the vendor's library imported."""
    from mylink.mylink_transport import MyLinkTransport

    return MyLinkTransport()
