"""Checks whether a host is set up for ``hccs``, one item at a time; imports the standard library
only."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mooncake_hal.errors import HalError
from mooncake_hal.specs import Check
from mooncake_hal_ascend.hccs.hccs_settings import (
    DEFAULTS,
    deadlines,
    engine_ports,
    settings_of_endpoint,
)
from mooncake_hal_ascend.hccs.npu_location import HCCN_CONF, device_addresses

LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
TOOLS = ("npu-smi", "hccn_tool")


def examine(
    devices: Sequence[int], vendor: Mapping[str, str], everywhere: str, root: Path
) -> list[Check]:
    """Check addresses, settings, ports and tools.

    Args:
        devices: physical numbers of the host's NPUs.
        vendor: the variables of HCCL and the engines that are set.
        everywhere: value of MOONCAKE_HAL_HCCS.
        root: root of the machine's file system.
    """
    return [
        *_addresses(devices, root),
        *_settings(vendor, everywhere),
        *_ports(devices or [0], vendor),
        *(_tool(name) for name in TOOLS),
    ]


def _addresses(devices: Sequence[int], root: Path) -> Iterator[Check]:
    addresses = device_addresses(root)
    what = f"addresses of {len(devices)} NPUs in /{HCCN_CONF}"
    missing = [number for number in devices if number not in addresses]
    twice = [address for address, count in Counter(addresses.values()).items() if count > 1]
    if missing:
        yield Check(
            what, f"NPUs {missing} have none: hccn_tool -i N -ip -s; needed beyond the HCCS domain"
        )
    elif twice:
        yield Check(what, f"{twice} are given twice; each NPU needs one of its own")
    else:
        yield Check(what)


def _settings(vendor: Mapping[str, str], everywhere: str) -> Iterator[Check]:
    try:
        settings = settings_of_endpoint({}, everywhere)
        limits = deadlines(vendor, settings.protocol)
    except HalError as exc:
        yield Check("settings of HCCL and hccs", str(exc))
        return
    yield Check(f"engine={settings.engine} protocol={settings.protocol} (MOONCAKE_HAL_HCCS)")
    yield Check(
        f"deadlines: {limits.connect_ms} ms to connect, {limits.transfer_ms} ms to transfer "
        f"({limits.reason})"
    )


def _ports(devices: Sequence[int], vendor: Mapping[str, str]) -> Iterator[Check]:
    try:
        taken = [each for name in DEFAULTS for each in engine_ports(name, vendor, devices)]
    except HalError as exc:
        yield Check("ports of the transfer engines", str(exc))
        return
    low, high = map(int, LOCAL_PORTS.read_text().split())
    for each in taken:
        overlaps = each.ports.first <= high and low <= each.ports.last
        yield Check(
            f"ports {each.ports} for {each.what}; keep --port and --kv-port out",
            f"the kernel gives {low}-{high} to anybody (net.ipv4.ip_local_port_range): move one "
            "of the two ranges"
            if overlaps
            else None,
        )


def _tool(name: str) -> Check:
    where = shutil.which(name)
    if where is None:
        return Check(
            name, "not in PATH; mount it, or add /usr/local/Ascend/driver/tools of the host to PATH"
        )
    return Check(f"{name} is {where}")
