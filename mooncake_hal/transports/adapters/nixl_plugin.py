"""Offers the ``nixl`` transport if NIXL is installed. Imports the standard library only."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec, installed

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

NAME = "nixl"

PRIORITY = -10
"""Below zero: it is used only if it is requested by name. Our own transports reach every peer that
this one reaches."""

BINDINGS = ("nixl-cu13", "nixl-cu12", "nixl-rocm")
"""Distributions with NIXL's libraries; the package ``nixl`` itself only imports one of these."""


def probe() -> Availability:
    """Check that the packages are installed; whether their libraries load is checked by
    ``load``."""
    spec, bindings = importlib.util.find_spec("nixl"), installed(BINDINGS)
    if spec is None or bindings is None:
        return Availability(
            False,
            "NIXL is not installed: pip install --no-deps nixl nixl-cu12 (or all of nixl, "
            "which brings CUDA along)",
        )
    return Availability(True, f"{bindings}: UCX, over what UCX_TLS allows; only when asked for")


def load() -> Transport:
    """Import NIXL and construct the transport.

    Raises:
        TransportUnavailable: its libraries do not load.
    """
    from mooncake_hal.transports.adapters.nixl_agent import load as load_nixl

    return load_nixl()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport."""
    return TransportSpec(NAME, API_VERSION, PRIORITY, probe, load)
