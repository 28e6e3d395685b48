"""Reads where an NPU stands from this server's files and tools."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal_ascend import env
from mooncake_hal_ascend.hccs.place import Place
from mooncake_hal_ascend.hccs.settings import NAME
from mooncake_hal_ascend.soc import SOCS, HccsDomain

HCCN_CONF = "etc/hccn.conf"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TOOL_SECONDS = 10.0

Ask = Callable[[Sequence[str]], str]
"""Runs a tool; returns what it printed, empty if it is not there or refuses."""


def ask_tool(command: Sequence[str]) -> str:
    """Run one of Ascend's tools; see ``Ask``."""
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout if found.returncode == 0 else ""


def locate(
    generation: str,
    device: int,
    protocol: str,
    vendor: Mapping[str, str],
    *,
    root: Path | None = None,
    ask: Ask = ask_tool,
) -> Place:
    """Say where an NPU stands.

    Args:
        generation: ``A2`` or ``A3``.
        device: its logical number in this process.
        protocol: what the transport is set to.
        vendor: the variables that are set.
        root: where the machine's files begin; by default what ``env.root`` says.
        ask: runs a tool.

    Raises:
        TransportUnavailable: one in a super-node does not say in which.
    """
    physical = physical_device(device, vendor)
    addresses = device_addresses(env.root() if root is None else root)
    pod = _super_pod(generation, physical, vendor, ask)
    return Place(
        generation,
        BOOT_ID.read_text().strip(),
        pod.get("Super Pod ID", ""),
        pod.get("SDID", ""),
        physical,
        addresses.get(physical, ""),
        protocol,
    )


def physical_device(device: int, vendor: Mapping[str, str]) -> int:
    """Return the server's number of an NPU that this process sees as ``device``.

    Raises:
        TransportUnavailable: ASCEND_RT_VISIBLE_DEVICES has no such entry.
    """
    visible = vendor.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible is None:
        return device
    numbers = [word.strip() for word in visible.split(",")]
    if device >= len(numbers) or not numbers[device].isdigit():
        raise TransportUnavailable(
            NAME, f"ASCEND_RT_VISIBLE_DEVICES={visible!r} has no number for npu:{device}"
        )
    return int(numbers[device])


def device_addresses(root: Path) -> dict[int, str]:
    """Return the addresses of the NPUs' NICs by physical number; empty without /etc/hccn.conf."""
    try:
        text = (root / HCCN_CONF).read_text()
    except FileNotFoundError:
        return {}
    found = re.findall(r"^\s*address_(\d+)\s*=\s*(\S+)", text, re.MULTILINE)
    return {int(number): address for number, address in found}


def _super_pod(
    generation: str, physical: int, vendor: Mapping[str, str], ask: Ask
) -> dict[str, str]:
    """Return what ``npu-smi info -t spod-info`` says of an NPU in a super-node; a card has two."""
    soc = next(soc for soc in SOCS if soc.generation == generation)
    if soc.hccs_domain is not HccsDomain.SUPER_NODE:
        return {}
    card, chip = divmod(physical, 2)
    command = ["npu-smi", "info", "-t", "spod-info", "-i", str(card), "-c", str(chip)]
    found = dict(re.findall(r"^\s*([A-Za-z ]+?)\s*:\s*(\S+)\s*$", ask(command), re.MULTILINE))
    logical = vendor.get("HCCL_LOGIC_SUPERPOD_ID")
    if logical:
        found["Super Pod ID"] = logical
    if not found.get("Super Pod ID"):
        raise TransportUnavailable(
            NAME,
            f"NPU {physical} does not say which super-node it is in ({' '.join(command)}); mount "
            "npu-smi and the driver into the container, or set HCCL_LOGIC_SUPERPOD_ID",
        )
    return found
