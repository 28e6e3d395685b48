"""Which entry of a NIC's GID table to speak from. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import IntEnum

from mooncake_hal.errors import TransportUnavailable


class GidKind(IntEnum):
    """What a GID is good for; the values are those of ibv_gid_type."""

    INFINIBAND = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table.

    Args:
        index: its place in the table.
        kind: which protocol it selects.
        text: eight groups of four hexadecimal digits, or any IPv6 notation.
    """

    index: int
    kind: GidKind
    text: str

    @property
    def address(self) -> ipaddress.IPv6Address:
        """The GID as an IPv6 address."""
        return ipaddress.IPv6Address(self.text)


def choose_gid(table: list[Gid], nic: str, wanted_index: int = -1) -> Gid:
    """Choose the GID to speak from: RoCE v2 over IPv4, then IPv6, then link-local, then others.

    Args:
        table: entries of one port; empty (all zero) ones are passed over.
        nic: names the port in messages.
        wanted_index: take this entry and no other; below zero chooses.

    Raises:
        TransportUnavailable: no usable entry.
    """
    usable = [gid for gid in table if int(gid.address) & (2**64 - 1)]
    if wanted_index >= 0:
        usable = [gid for gid in usable if gid.index == wanted_index]
    if not usable:
        which = f"GID {wanted_index}" if wanted_index >= 0 else "GID"
        raise TransportUnavailable(
            "rdma", f"{nic} has no usable {which}; has its network device an IP address?"
        )
    return min(usable, key=lambda gid: (_rank(gid), gid.index))


def _rank(gid: Gid) -> int:
    if gid.kind is GidKind.ROCE_V2:
        if gid.address.ipv4_mapped:
            return 0
        return 2 if gid.address.is_link_local else 1
    return 3 if gid.kind is GidKind.INFINIBAND else 4
