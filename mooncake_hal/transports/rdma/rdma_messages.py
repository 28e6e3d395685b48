"""Messages between two rdma endpoints, and which of their NICs can reach each other. Pure."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

from mooncake_hal.errors import PeerLost, TransferError
from mooncake_hal.session.authentication import UNREADABLE

VERSION = 2

INFINIBAND = "InfiniBand"
ETHERNET = "Ethernet"

MAX_NICS = 256
"""Maximum number of NICs of one endpoint: each costs its peers a queue pair, and a NIC's index is
sent as one byte."""

Byte = Annotated[int, msgspec.Meta(ge=0, lt=2**8)]
U16 = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
U24 = Annotated[int, msgspec.Meta(ge=0, lt=2**24)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has nothing longer


class NicInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One port of a NIC, as published to peers.

    Args:
        name: ``device:port``.
        link: INFINIBAND or ETHERNET.
        gid: the port's GID.
        lid: local identifier; 0 on Ethernet.
    """

    name: str
    link: str
    gid: str
    lid: U16

    def __post_init__(self) -> None:
        ipaddress.IPv6Address(self.gid)  # makes decoding fail if it is invalid


class RdmaEndpointInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The info that an rdma endpoint publishes."""

    nics: Annotated[list[NicInfo], msgspec.Meta(max_length=MAX_NICS)]


class QueuePairInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One end of a reliable connection.

    Args:
        nic: index of its NIC among the endpoint's NICs.
        gid, lid: address of that NIC's port.
        qpn: queue pair number.
        psn: first packet sequence number that it sends.
        mtu: largest MTU, as a value of the verbs' enum.
        reads: number of RDMA READs that it can serve concurrently.
    """

    nic: Byte
    gid: str
    lid: U16
    qpn: U24
    psn: U24
    mtu: Byte
    reads: Byte

    def __post_init__(self) -> None:
        ipaddress.IPv6Address(self.gid)


class OpenQueuePairs(
    msgspec.Struct,
    frozen=True,
    tag="open",
    forbid_unknown_fields=True,
    rename={"nics": "rails", "queue_pairs": "lanes"},
):
    """Call: create queue pairs; ``nics`` has the index of the server's NIC for each of them."""

    nics: list[int]
    queue_pairs: list[QueuePairInfo]


class ReopenQueuePair(
    msgspec.Struct,
    frozen=True,
    tag="reopen",
    forbid_unknown_fields=True,
    rename={"queue_pair": "lane"},
):
    """Call: replace a queue pair by a new one."""

    number: int
    queue_pair: QueuePairInfo


class QueuePairsOpened(
    msgspec.Struct,
    frozen=True,
    tag="opened",
    forbid_unknown_fields=True,
    rename={"queue_pairs": "lanes"},
):
    """Reply to both calls: the server's queue pairs."""

    queue_pairs: list[QueuePairInfo]


class RegionKeys(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The keys of one region, for each NIC of its endpoint.

    Args:
        keys: each NIC's key of the region.
        shifts: for each NIC, the offset from a process's address to the NIC's, modulo 2**64.
        on_host: whether the endpoint's CPU can read the region.
    """

    keys: list[U32]
    shifts: list[U64]
    on_host: bool


_calls: msgspec.msgpack.Decoder[OpenQueuePairs | ReopenQueuePair] = msgspec.msgpack.Decoder(
    OpenQueuePairs | ReopenQueuePair
)


def decode_call(payload: bytes) -> OpenQueuePairs | ReopenQueuePair:
    """Decode a call; raises PeerLost if it is invalid."""
    try:
        return _calls.decode(payload)
    except UNREADABLE as exc:
        raise PeerLost(f"the peer broke the rdma protocol: {exc}") from exc


def decode_endpoint_info(data: bytes) -> RdmaEndpointInfo:
    """Decode an endpoint's published info; raises TransferError if it is invalid."""
    try:
        return msgspec.msgpack.decode(data, type=RdmaEndpointInfo)
    except UNREADABLE as exc:
        raise TransferError(f"this is not the info of an rdma endpoint: {exc}") from exc


def decode_region_keys(data: bytes, nics: int) -> RegionKeys:
    """Decode a region's keys; raises PeerLost if they are not for ``nics`` NICs."""
    try:
        found = msgspec.msgpack.decode(data, type=RegionKeys)
    except UNREADABLE as exc:
        raise PeerLost(f"the peer broke the rdma protocol: {exc}") from exc
    if {len(found.keys), len(found.shifts)} != {nics}:
        raise PeerLost(f"the peer broke the rdma protocol: {found} is not for {nics} NICs")
    return found


def pair_nics(
    ours: list[NicInfo], theirs: list[NicInfo], connections: int
) -> list[tuple[int, int]]:
    """Choose (our NIC, the peer's NIC) for each queue pair, spread over all NICs of both ends.

    NIC n is paired with NIC n if both ends have it, as in rail-optimised fabrics. Returns at least
    ``connections`` pairs, and more if some NIC would be idle otherwise; none if no two NICs can
    reach each other.
    """
    if not ours or not theirs:
        return []
    aligned = [(n % len(ours), n % len(theirs)) for n in range(max(len(ours), len(theirs)))]
    crossed = [(here, there) for here in range(len(ours)) for there in range(len(theirs))]
    for pairs in (aligned, crossed):
        usable = [
            pair
            for pair in pairs
            if nics_unreachable_reason(ours[pair[0]], theirs[pair[1]]) is None
        ]
        if usable:
            return [
                usable[connection % len(usable)]
                for connection in range(max(connections, len(usable)))
            ]
    return []


def nics_unreachable_reason(ours: NicInfo, theirs: NicInfo) -> str | None:
    """Return why two ports can't reach each other according to their addresses, or None."""
    if ours.link != theirs.link:
        return f"{ours.name} is {ours.link}, {theirs.name} is {theirs.link}"
    here, there = ipaddress.IPv6Address(ours.gid), ipaddress.IPv6Address(theirs.gid)
    if ours.link == INFINIBAND and int(here) >> 64 != int(there) >> 64:
        return f"{ours.name} and {theirs.name} are in different InfiniBand subnets"
    if ours.link == ETHERNET and bool(here.ipv4_mapped) != bool(there.ipv4_mapped):
        return f"{ours.name} has {ours.gid}, {theirs.name} has {theirs.gid}: two address families"
    return None


def unreachable_reason(ours: list[NicInfo], theirs: list[NicInfo]) -> str | None:
    """Return why none of our NICs can reach one of the peer's, or None if one may."""
    reasons = [nics_unreachable_reason(here, there) for here in ours for there in theirs]
    if not reasons:
        return "an endpoint without NICs"
    return None if None in reasons else "; ".join(sorted({str(reason) for reason in reasons}))
