"""Offers the ``shm`` transport, which connects any two processes of one Linux host."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

PRIORITY = 50
"""Above tcp and the adapters; below the transports that move device memory without the host."""


def probe() -> Availability:
    """Check whether this host supports the transport, and with which ways of copying."""
    if not sys.platform.startswith("linux"):
        return Availability(False, f"needs Linux, this is {sys.platform}")
    from mooncake_hal.transports.shm.process_memory import describe_ptrace_scope

    return Availability(True, describe_ptrace_scope())


def load() -> Transport:
    """Import and construct the transport."""
    from mooncake_hal.transports.shm.shm_transport import load as load_shm

    return load_shm()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport."""
    return TransportSpec(
        "shm", API_VERSION, PRIORITY, probe, load, num_ports=0, is_within_host=True
    )
