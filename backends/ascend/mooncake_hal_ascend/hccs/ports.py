"""The TCP ports that the vendors' engines take by themselves, to keep ours out of them. Pure.

mooncake takes one of a range per NPU, at random, and one for its own handshakes; memfabric one
for its store. We name the ranges to them, so that they are the same with every version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mooncake_hal.errors import HalError
from mooncake_hal.port_range import PortRange, ReservedPorts

PORTS_PER_DEVICE = 1000
"""Older engines take one of so many; 0.3.13 one of the first hundred."""

DEFAULTS = {
    "mooncake": {
        "ASCEND_BASE_PORT": "20000",
        "MC_MIN_RPC_PORT": "15000",
        "MC_MAX_RPC_PORT": "17000",
    },
    "memfabric": {"MF_CONFIG_STORE_PORT_START": "17001", "MF_CONFIG_STORE_PORT_END": "19000"},
}
"""What the engines are told where the operator says nothing."""


def engine_ports(
    engine: str, vendor: Mapping[str, str], devices: Sequence[int]
) -> tuple[ReservedPorts, ...]:
    """Return what an engine may take on this host.

    Args:
        engine: ``mooncake`` or ``memfabric``.
        vendor: the variables that are set.
        devices: physical numbers of the NPUs.

    Raises:
        HalError: a variable is no port, or the ranges leave the ports that there are.
    """
    named = {name: _port(name, vendor.get(name, text)) for name, text in DEFAULTS[engine].items()}
    if engine == "memfabric":
        return (_range("memfabric's store", named),)
    base = named["ASCEND_BASE_PORT"]
    last = base + (max(devices) + 1) * PORTS_PER_DEVICE
    if last > 65535:
        raise HalError(
            f"ASCEND_BASE_PORT={base} with NPU {max(devices)} leads to port {last}; choose a base "
            f"of at most {65535 - (max(devices) + 1) * PORTS_PER_DEVICE}"
        )
    first = base + min(devices) * PORTS_PER_DEVICE
    links = PortRange(first, last)
    del named["ASCEND_BASE_PORT"]
    return (
        ReservedPorts("the mooncake engine's links", links, "ASCEND_BASE_PORT"),
        _range("the mooncake engine's handshakes", named),
    )


def _range(what: str, named: Mapping[str, int]) -> ReservedPorts:
    """What two variables, the first and the last port, say."""
    first, last = named.values()
    setting = " and ".join(named)
    try:
        return ReservedPorts(what, PortRange(first, last), setting)
    except ValueError as exc:
        raise HalError(f"{setting}: {exc}") from exc


def _port(name: str, text: str) -> int:
    if not re.fullmatch(r"\d+", text) or not 1024 <= int(text) <= 65535:
        raise HalError(f"{name}={text!r} must be a port from 1024 to 65535")
    return int(text)
