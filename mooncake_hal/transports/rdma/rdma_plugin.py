"""Offers the ``rdma`` transport, and lists the RDMA ports of this host. Imports only the standard
library."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_hal.hookspecs import hookimpl
from mooncake_hal.specs import API_VERSION, Availability, TransportSpec

if TYPE_CHECKING:
    from mooncake_hal.transport import Transport


@dataclass(frozen=True, slots=True)
class RdmaHost:
    """The kernel's directories for RDMA.

    Args:
        devices: directory with a subdirectory per device.
        nodes: directory with the device files through which verbs are called.
    """

    devices: Path = Path("/sys/class/infiniband")
    nodes: Path = Path("/dev/infiniband")


THIS_HOST = RdmaHost()


def active_ports(host: RdmaHost = THIS_HOST) -> list[str]:
    """Return ``device:port`` of every port that is up, ordered by name."""
    states = sorted(host.devices.glob("*/ports/*/state"))
    return [
        f"{state.parents[2].name}:{state.parent.name}"
        for state in states
        if state.read_text().endswith("ACTIVE\n")
    ]


PRIORITY = 40
"""Above tcp and the adapters; below the transports within one host or one super-node."""


def probe(host: RdmaHost = THIS_HOST) -> Availability:
    """Check for a port that is up, for permission to access it, and for pyverbs."""
    reason = _unavailable_reason(host)
    return (
        Availability(False, reason) if reason else Availability(True, ", ".join(active_ports(host)))
    )


def _unavailable_reason(host: RdmaHost) -> str | None:
    if not host.devices.is_dir() or not any(host.devices.iterdir()):
        return f"no RDMA device: {host.devices} is missing or empty"
    if not active_ports(host):
        return f"no port under {host.devices} is ACTIVE; is the link up?"
    nodes = list(host.nodes.glob("uverbs*"))
    if not nodes:
        return f"no {host.nodes}/uverbs*: load ib_uverbs, or pass them to the container"
    if not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return f"no permission to open {host.nodes}/uverbs*"
    if importlib.util.find_spec("pyverbs") is None:
        return (
            "pyverbs can't be imported: install the distribution's python3-pyverbs, of the same "
            "release as libibverbs (not PyPI's), and make it visible to this interpreter"
        )
    return None


def load() -> Transport:
    """Import pyverbs and construct the transport.

    Raises:
        TransportUnavailable: pyverbs does not load.
    """
    from mooncake_hal.transports.rdma.rdma_endpoint import RdmaTransport

    return RdmaTransport()


@hookimpl
def mooncake_hal_transport() -> TransportSpec:
    """Offer the transport."""
    return TransportSpec("rdma", API_VERSION, PRIORITY, probe, load)
