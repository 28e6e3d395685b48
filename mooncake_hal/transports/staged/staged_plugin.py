"""Offers the ``staged`` transport, which moves memory of any device by way of host memory. Imports
the standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

PRIORITY = 5
"""Below all transports that need no staging."""
NUM_PORTS = 3
"""Its own port, and those of the inner tcp and rdma endpoints."""


def probe() -> Availability:
    """Always available: whether the device's backend offers host copies is checked when an endpoint
    is opened."""
    return Availability(True, "a device's memory through the host's, over rdma or tcp")


def load() -> Transport:
    """Import and construct the transport."""
    from mooncake_hal.transports.staged.staged_transport import load as load_transport

    return load_transport()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport."""
    return TransportSpec("staged", API_VERSION, PRIORITY, probe, load, num_ports=NUM_PORTS)
