"""Which RDMA ports this host has, as the kernel lists them. Standard library only."""

from __future__ import annotations

from pathlib import Path

DEVICES = Path("/sys/class/infiniband")


def active_ports(devices: Path = DEVICES) -> list[str]:
    """Return ``device:port`` of every port that is up, in the order of their names."""
    states = sorted(devices.glob("*/ports/*/state"))
    return [
        f"{state.parents[2].name}:{state.parent.name}"
        for state in states
        if state.read_text().endswith("ACTIVE\n")
    ]
