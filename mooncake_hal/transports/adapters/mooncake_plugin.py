"""Offers the ``mooncake`` transport if mooncake-transfer-engine is installed. Imports the standard
library only."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec, installed

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

NAME = "mooncake"

PRIORITY = -10
"""Below zero: it is used only if it is requested by name. Our own transports reach every peer that
this one reaches."""

DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


def probe() -> Availability:
    """Check that the package is installed; whether its libraries load is checked by ``load``."""
    spec = importlib.util.find_spec("mooncake")
    found = installed(DISTRIBUTIONS)
    if spec is None or found is None:
        return Availability(
            False,
            "mooncake-transfer-engine is not installed: "
            "pip install mooncake-transfer-engine-non-cuda (or mooncake-transfer-engine, for CUDA "
            "memory)",
        )
    return Availability(True, f"{found}: tcp, or rdma if set; only when asked for")


def load() -> Transport:
    """Import the engine and construct the transport.

    Raises:
        TransportUnavailable: its libraries do not load.
    """
    from mooncake_hal.transports.adapters.mooncake_agent import load as load_mooncake

    return load_mooncake()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport."""
    return TransportSpec(NAME, API_VERSION, PRIORITY, probe, load)
