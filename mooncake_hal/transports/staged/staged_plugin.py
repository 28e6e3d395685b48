"""Entry point of the ``staged`` transport; standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

PRIORITY = 5
"""Below everything that needs no staging."""
NUM_PORTS = 3
"""Its own, and those of tcp and rdma."""


def probe() -> Availability:
    """It runs on any host: whether a device's backend copies is seen when an endpoint is opened."""
    return Availability(True, "a device's memory through the host's, over rdma or tcp")


def load() -> Transport:
    """Import and construct it."""
    from mooncake_hal.transports.staged.staged_transport import load as load_transport

    return load_transport()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport."""
    return TransportSpec("staged", API_VERSION, PRIORITY, probe, load, num_ports=NUM_PORTS)
