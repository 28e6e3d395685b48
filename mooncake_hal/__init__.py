"""Hardware layer of mooncake-hal: find a backend or a transport by name, and hold its contract.

Importing this package costs nothing: no torch, no probe, no environment. ``Registry.discover()``
finds the installed plugins, ``select_backend`` loads one.
"""

from __future__ import annotations

from mooncake_hal.registry import PluginStatus, Registry, TableRow
from mooncake_hal.specs import API_VERSION, Availability, BackendSpec, TransportSpec

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "Availability",
    "BackendSpec",
    "PluginStatus",
    "Registry",
    "TableRow",
    "TransportSpec",
]
