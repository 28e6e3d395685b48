"""Where an NPU stands, and whether two of them can reach each other. Pure."""

from __future__ import annotations

import msgspec

from mooncake_hal.errors import TransferError
from mooncake_hal.transports.handshake import UNREADABLE, encode


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint publishes of its NPU.

    Args:
        generation: ``A2`` or ``A3``.
        server: identity of the running kernel, the same in all containers of a server.
        super_pod: the A3 super-node; empty on an A2.
        super_device: the NPU's number (SDID) in it; empty on an A2.
        device: the NPU's physical number in its server.
        device_address: IP address of the NPU's own NIC; empty if /etc/hccn.conf has none.
        protocol: ``auto``, ``hccs`` or ``roce``: what this end is set to.
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
        """How far HCCS goes from here, in words."""
        if self.super_pod:
            return f"the super-node {self.super_pod}"
        return f"the server {self.server}"

    def encode(self) -> bytes:
        """Return it as an adapter's ``place``."""
        return encode(self)


def decode_place(data: bytes) -> Place:
    """Read what an endpoint published; raises TransferError if it is something else."""
    try:
        return msgspec.msgpack.decode(data, type=Place)
    except UNREADABLE as exc:
        raise TransferError(f"these are no facts of an NPU: {exc}") from exc


def why_apart(ours: bytes, theirs: bytes) -> str | None:
    """Say why two NPUs can't reach each other, with what could be used instead; None if they can.

    Raises:
        TransferError: one of the places is none.
    """
    here, there = decode_place(ours), decode_place(theirs)
    return (
        _why_strangers(here, there)
        or _why_one_number(here, there)
        or _why_out_of_reach(here, there)
    )


def _why_strangers(here: Place, there: Place) -> str | None:
    if here.generation != there.generation:
        return (
            f"this end is an {here.generation}, the peer an {there.generation}; the engines join "
            "one generation only: use tcp"
        )
    if here.protocol != there.protocol:
        return (
            f"this end is set to protocol={here.protocol}, the peer to {there.protocol}; "
            "set MOONCAKE_HAL_HCCS alike on both"
        )
    return None


def _why_one_number(here: Place, there: Place) -> str | None:
    """Two different NPUs that claim one identity, as after a server's parts were replaced."""
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


def _why_out_of_reach(here: Place, there: Place) -> str | None:
    is_inside = here.domain == there.domain
    if is_inside and here.protocol != "roce":
        return None
    ends = f"HCCS ends at {here.domain}, the peer is in {there.domain}; " if not is_inside else ""
    missing = [who for who, place in _named(here, there) if not place.device_address]
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


def _named(here: Place, there: Place) -> tuple[tuple[str, Place], tuple[str, Place]]:
    return ("this end", here), ("the peer", there)
