"""What two RDMA endpoints tell each other, and who speaks to whom. Pure."""

from __future__ import annotations

import ipaddress
from typing import Annotated

import msgspec

from mooncake_hal.errors import PeerLost, TransferError
from mooncake_hal.transports.handshake import UNREADABLE

VERSION = 1

INFINIBAND = "InfiniBand"
ETHERNET = "Ethernet"

Byte = Annotated[int, msgspec.Meta(ge=0, lt=2**8)]
U16 = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
U24 = Annotated[int, msgspec.Meta(ge=0, lt=2**24)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has nothing longer


class RailFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One port of a NIC, as peers need to know it.

    Args:
        name: ``device:port``.
        link: INFINIBAND or ETHERNET.
        gid: the GID that it speaks from.
        lid: local identifier; 0 on Ethernet.
    """

    name: str
    link: str
    gid: str
    lid: U16

    def __post_init__(self) -> None:
        ipaddress.IPv6Address(self.gid)  # decoding fails with its reason if it is none


class EndpointFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an RDMA endpoint publishes."""

    rails: list[RailFacts]


class LaneFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One end of a queue pair.

    Args:
        rail: which of its endpoint's rails it is on.
        gid, lid: address of that port.
        qpn: queue pair number.
        psn: first packet sequence number that it sends.
        mtu: largest MTU, as the enum of the verbs.
        reads: RDMA READs that it can serve at once.
    """

    rail: Byte
    gid: str
    lid: U16
    qpn: U24
    psn: U24
    mtu: Byte
    reads: Byte

    def __post_init__(self) -> None:
        ipaddress.IPv6Address(self.gid)


class OpenLanes(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Call: make queue pairs. ``rails`` says on which of the server's rails each belongs."""

    rails: list[int]
    lanes: list[LaneFacts]


class ReopenLane(msgspec.Struct, frozen=True, tag="reopen", forbid_unknown_fields=True):
    """Call: replace one queue pair by a new one."""

    number: int
    lane: LaneFacts


class LanesOpened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """Answer to both: the server's ends."""

    lanes: list[LaneFacts]


class RegionKeys(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to address one region, per rail of its endpoint.

    Args:
        keys: the NIC's key.
        shifts: what to add to an address, modulo 2**64, to get the NIC's address.
        on_host: whether the endpoint's CPU can read it.
    """

    keys: list[U32]
    shifts: list[U64]
    on_host: bool


_calls: msgspec.msgpack.Decoder[OpenLanes | ReopenLane] = msgspec.msgpack.Decoder(
    OpenLanes | ReopenLane
)


def decode_call(payload: bytes) -> OpenLanes | ReopenLane:
    """Read a call; raises PeerLost if it is none."""
    try:
        return _calls.decode(payload)
    except UNREADABLE as exc:
        raise PeerLost(f"the peer broke the rdma protocol: {exc}") from exc


def decode_facts(data: bytes) -> EndpointFacts:
    """Read what an endpoint published; raises TransferError if it is something else."""
    try:
        return msgspec.msgpack.decode(data, type=EndpointFacts)
    except UNREADABLE as exc:
        raise TransferError(f"these are no facts of an rdma endpoint: {exc}") from exc


def decode_region_keys(data: bytes, rails: int) -> RegionKeys:
    """Read how to address a region; raises PeerLost if it does not say so for every rail."""
    try:
        found = msgspec.msgpack.decode(data, type=RegionKeys)
    except UNREADABLE as exc:
        raise PeerLost(f"the peer broke the rdma protocol: {exc}") from exc
    if {len(found.keys), len(found.shifts)} != {rails}:
        raise PeerLost(f"the peer broke the rdma protocol: {found} is not for {rails} rails")
    return found


def pair_rails(ours: list[RailFacts], theirs: list[RailFacts], lanes: int) -> list[tuple[int, int]]:
    """Choose (our rail, their rail) for each queue pair, spread over all rails of both ends.

    Rail n speaks to rail n where both have it, as in rail-optimised fabrics. ``lanes`` is raised
    so that no rail stays idle. Empty if no two rails can speak to each other.
    """
    if not ours or not theirs:
        return []
    aligned = [(n % len(ours), n % len(theirs)) for n in range(max(len(ours), len(theirs)))]
    crossed = [(here, there) for here in range(len(ours)) for there in range(len(theirs))]
    for pairs in (aligned, crossed):
        usable = [pair for pair in pairs if why_apart(ours[pair[0]], theirs[pair[1]]) is None]
        if usable:
            return [usable[lane % len(usable)] for lane in range(max(lanes, len(usable)))]
    return []


def why_apart(ours: RailFacts, theirs: RailFacts) -> str | None:
    """Say why two ports can't speak to each other, as far as their addresses tell; else None."""
    if ours.link != theirs.link:
        return f"{ours.name} is {ours.link}, {theirs.name} is {theirs.link}"
    here, there = ipaddress.IPv6Address(ours.gid), ipaddress.IPv6Address(theirs.gid)
    if ours.link == INFINIBAND and int(here) >> 64 != int(there) >> 64:
        return f"{ours.name} and {theirs.name} are in different InfiniBand subnets"
    if ours.link == ETHERNET and bool(here.ipv4_mapped) != bool(there.ipv4_mapped):
        return f"{ours.name} speaks from {ours.gid}, {theirs.name} from {theirs.gid}"
    return None


def why_unreachable(ours: list[RailFacts], theirs: list[RailFacts]) -> str | None:
    """Say why no rail of ours reaches one of theirs, or None if one may."""
    reasons = [why_apart(here, there) for here in ours for there in theirs]
    if not reasons:
        return "an endpoint without rails"
    return None if None in reasons else "; ".join(sorted({str(reason) for reason in reasons}))
