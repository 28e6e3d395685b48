"""Which server and HCCS domain an NPU is in, and whether two NPUs can reach each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.session.authentication import UNREADABLE, encode
from mooncake_hal_ascend import ascend_env
from mooncake_hal_ascend.hccs.hccs_settings import NAME
from mooncake_hal_ascend.soc import SOCS, HccsDomain

HCCN_CONF = "etc/hccn.conf"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TOOL_SECONDS = 10.0
RunTool = Callable[[Sequence[str]], str]
"""Runs a tool and returns its output, which is empty if the tool is missing or fails."""


class NpuLocation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Published info of an endpoint's NPU.

    Args:
        generation: ``A2`` or ``A3``.
        server: identity of the running kernel, the same in all containers of a server.
        super_pod: id of the A3 super-node; empty on an A2.
        super_device: the NPU's number (SDID) in the super-node; empty on an A2.
        device: the NPU's physical number in its server.
        device_address: IP address of the NPU's own NIC; empty if /etc/hccn.conf has none.
        protocol: this end's protocol setting: ``auto``, ``hccs`` or ``roce``.
    """

    generation: str
    server: str
    super_pod: str
    super_device: str
    device: int
    device_address: str
    protocol: str

    @property
    def domain(self) -> str:
        """The NPU's HCCS domain, in words."""
        if self.super_pod:
            return f"the super-node {self.super_pod}"
        return f"the server {self.server}"

    def encode(self) -> bytes:
        """Encode the info for publication."""
        return encode(self)


def decode_location(data: bytes) -> NpuLocation:
    """Decode an endpoint's published info; raises TransferError if it is malformed."""
    try:
        return msgspec.msgpack.decode(data, type=NpuLocation)
    except UNREADABLE as exc:
        raise TransferError(f"malformed NPU location: {exc}") from exc


def unreachable_reason(ours: bytes, theirs: bytes) -> str | None:
    """The reason why two NPUs can't reach each other, and what to use instead; None if they can.

    Raises:
        TransferError: the bytes are not a location.
    """
    here, there = decode_location(ours), decode_location(theirs)
    return (
        _incompatible_reason(here, there)
        or _ambiguous_reason(here, there)
        or _out_of_reach_reason(here, there)
    )


def _incompatible_reason(here: NpuLocation, there: NpuLocation) -> str | None:
    if here.generation != there.generation:
        return (
            f"this end is an {here.generation}, the peer an {there.generation}; the engines "
            "connect NPUs of one generation only: use tcp"
        )
    if here.protocol != there.protocol:
        return (
            f"this end is set to protocol={here.protocol}, the peer to {there.protocol}; "
            "set MOONCAKE_HAL_HCCS alike on both"
        )
    return None


def _ambiguous_reason(here: NpuLocation, there: NpuLocation) -> str | None:
    """The reason if two different NPUs claim the same identity, as after parts of a server were
    replaced."""
    if (here.server, here.device) == (there.server, there.device):
        return None
    numbers = (here.super_pod, here.super_device), (there.super_pod, there.super_device)
    if here.super_device and numbers[0] == numbers[1]:
        return (
            f"both NPUs claim to be number {here.super_device} of {here.domain}; set the servers' "
            "numbers right (npu-smi info -t spod-info shows them)"
        )
    if here.device_address and here.device_address == there.device_address:
        return (
            f"both NPUs claim the address {here.device_address}; give each its own (hccn_tool, "
            "/etc/hccn.conf)"
        )
    return None


def _out_of_reach_reason(here: NpuLocation, there: NpuLocation) -> str | None:
    is_inside = here.domain == there.domain
    if is_inside and here.protocol != "roce":
        return None
    ends = f"HCCS ends at {here.domain}, the peer is in {there.domain}; " if not is_inside else ""
    ends_by_name = {"this end": here, "the peer": there}
    missing = [name for name, end in ends_by_name.items() if not end.device_address]
    if missing:
        return (
            f"{ends}RoCE needs the NPUs' addresses, and {' and '.join(missing)} has none in "
            "/etc/hccn.conf: give it one (hccn_tool), or use tcp"
        )
    if here.protocol == "hccs":
        return (
            f"{ends}protocol=auto would go by RoCE from {here.device_address} to "
            f"{there.device_address}, or use tcp"
        )
    return None


def run_tool(command: Sequence[str]) -> str:
    """Run one of Ascend's tools; see ``RunTool``."""
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
    ask: RunTool = run_tool,
) -> NpuLocation:
    """Find an NPU's location.

    Args:
        generation: ``A2`` or ``A3``.
        device: the NPU's logical number in this process.
        protocol: the transport's protocol setting.
        vendor: the variables that are set.
        root: root of the machine's file system; by default ``ascend_env.root()``.
        ask: runs a tool.

    Raises:
        TransportUnavailable: the NPU is in a super-node, but its tools do not report which one.
    """
    physical = physical_device(device, vendor)
    addresses = device_addresses(ascend_env.root() if root is None else root)
    pod = _super_pod(generation, physical, vendor, ask)
    return NpuLocation(
        generation,
        BOOT_ID.read_text().strip(),
        pod.get("Super Pod ID", ""),
        pod.get("SDID", ""),
        physical,
        addresses.get(physical, ""),
        protocol,
    )


def physical_device(device: int, vendor: Mapping[str, str]) -> int:
    """The physical number in its server of the NPU with logical number ``device``.

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
    """Addresses of the NPUs' NICs, by physical number; empty without /etc/hccn.conf."""
    try:
        text = (root / HCCN_CONF).read_text()
    except FileNotFoundError:
        return {}
    found = re.findall(r"^\s*address_(\d+)\s*=\s*(\S+)", text, re.MULTILINE)
    return {int(number): address for number, address in found}


def _super_pod(
    generation: str, physical: int, vendor: Mapping[str, str], ask: RunTool
) -> dict[str, str]:
    """The output of ``npu-smi info -t spod-info`` for an NPU, parsed; empty if the family has no
    super-nodes.

    A card has two NPUs.
    """
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
            f"the super-node of NPU {physical} is unknown ({' '.join(command)}); mount npu-smi and "
            "the driver into the container, or set HCCL_LOGIC_SUPERPOD_ID",
        )
    return found
