"""Which RDMA ports this host has, as the kernel lists them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Host:
    """Where the kernel shows RDMA.

    Args:
        devices: folder with a folder per device.
        nodes: folder with the files that verbs are called through.
    """

    devices: Path = Path("/sys/class/infiniband")
    nodes: Path = Path("/dev/infiniband")


THIS_HOST = Host()


def active_ports(host: Host = THIS_HOST) -> list[str]:
    """Return ``device:port`` of every port that is up, in the order of their names."""
    states = sorted(host.devices.glob("*/ports/*/state"))
    return [
        f"{state.parents[2].name}:{state.parent.name}"
        for state in states
        if state.read_text().endswith("ACTIVE\n")
    ]
