"""What two cuda_ipc endpoints tell each other. Pure."""

from __future__ import annotations

import secrets
from functools import cache

import msgspec

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.transports.handshake import UNREADABLE, decode
from mooncake_hal.transports.shm.host import host_identity
from mooncake_hal_cuda.driver import HANDLE_BYTES
from mooncake_hal_cuda.sharing.choice import MemoryKind
from mooncake_hal_cuda.sharing.fabric import Domain

NAME = "cuda_ipc"
VERSION = 2


class EndpointFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint publishes.

    Args:
        host: see ``shm.host.host_identity``.
        process: random identity of the process.
        device: UUID of its device.
        domain: NVLink domain in which its memory can be mapped, or None if on its host alone.
    """

    host: str
    process: bytes
    device: bytes
    domain: Domain | None


class RegionName(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a region is mapped: in which ways the allocation can be had that it lies in.

    Args:
        offset: where in the allocation the region begins, in bytes.
        nbytes: of the whole allocation.
        ipc: its name for processes of this host, or empty.
        fabric: its name in the NVLink domain, or empty.
        has_descriptor: whether a descriptor of it can be asked for.
    """

    offset: int
    nbytes: int
    ipc: bytes = b""
    fabric: bytes = b""
    has_descriptor: bool = False

    def __post_init__(self) -> None:
        if any(len(name) not in (0, HANDLE_BYTES) for name in (self.ipc, self.fabric)):
            raise ValueError(f"a name of memory has {HANDLE_BYTES} bytes")
        if not (self.ipc or self.fabric or self.has_descriptor):
            raise ValueError("a region that can be had in no way")
        if not 0 <= self.offset < self.nbytes:
            raise ValueError(f"a region at {self.offset} of an allocation of {self.nbytes} bytes")


class SendDescriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Call: send a descriptor of the allocation around region ``key``.

    Args:
        key: of the region.
        mailbox: the abstract socket of the caller that takes it.
        token: to send with it.
    """

    key: int
    mailbox: str
    token: bytes


@cache
def process_identity() -> bytes:
    """Random identity of this process; a handle can't be opened where it was made."""
    return secrets.token_bytes(16)


def own_facts(device: bytes, domain: Domain | None) -> EndpointFacts:
    """The facts of an endpoint of this process, on the device of that UUID."""
    return EndpointFacts(host_identity(), process_identity(), device, domain)


def decode_facts(data: bytes) -> EndpointFacts:
    """Read a peer's facts; raises PeerLost if they are none."""
    return decode(data, EndpointFacts)


def decode_name(data: bytes) -> RegionName:
    """Read a region's name; raises PeerLost if it is none."""
    return decode(data, RegionName)


def decode_call(payload: bytes) -> SendDescriptor:
    """Read a call; raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(payload, type=SendDescriptor)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc


def why_unreachable(ours: EndpointFacts, theirs: EndpointFacts) -> str | None:
    """Say why one process can't map the other's memory, or None."""
    if ours.host == theirs.host:
        return None
    apart = "they are on different hosts or in different network namespaces"
    if ours.domain is None or theirs.domain is None:
        side = "ours" if ours.domain is None else "the peer's"
        return f"{apart}, and {side} is not memory that NVLink reaches from there"
    if ours.domain != theirs.domain:
        return f"{apart}, and in different NVLink domains ({ours.domain}, {theirs.domain})"
    return None


def way_to(name: RegionName, *, is_same_host: bool) -> MemoryKind:
    """How to map a region: what needs least of the system first.

    Raises:
        TransportUnavailable: it can be had in no way that reaches there.
    """
    if is_same_host and name.has_descriptor:
        return MemoryKind.DESCRIPTOR
    if is_same_host and name.ipc:
        return MemoryKind.IPC
    if name.fabric:
        return MemoryKind.FABRIC
    raise TransportUnavailable(NAME, "the peer's region is not memory that NVLink reaches")
