"""Offers the ``rdma`` transport. Standard library only."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec
from mooncake_hal.transports.rdma.ports import DEVICES, active_ports

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport

PRIORITY = 40
"""Above tcp and the adapters, below what stays inside one host or one super-node."""


def probe(devices: Path = DEVICES) -> Availability:
    """Look for a port that is up, for access to it, and for pyverbs."""
    ports = active_ports(devices)
    if not devices.is_dir() or not any(devices.iterdir()):
        return Availability(False, f"no RDMA device: {devices} is missing or empty")
    if not ports:
        return Availability(False, f"no port under {devices} is ACTIVE; is the link up?")
    if not list(Path("/dev/infiniband").glob("uverbs*")):
        return Availability(
            False,
            "no /dev/infiniband/uverbs*: load ib_uverbs, or pass them to the container",
        )
    if not any(os.access(path, os.R_OK | os.W_OK) for path in Path("/dev/infiniband").glob("u*")):
        return Availability(False, "no permission to open /dev/infiniband/uverbs*")
    if importlib.util.find_spec("pyverbs") is None:
        return Availability(
            False,
            "pyverbs can't be imported: install the distribution's python3-pyverbs, of the same "
            "release as libibverbs (not PyPI's), and make it visible to this interpreter",
        )
    return Availability(True, ", ".join(ports))


def load() -> Transport:
    """Import pyverbs and construct the transport.

    Raises:
        TransportUnavailable: pyverbs does not load.
    """
    from mooncake_hal.transports.rdma.transport import RdmaTransport

    return RdmaTransport()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer ``rdma``."""
    return TransportSpec("rdma", API_VERSION, PRIORITY, probe, load)
