"""Messages between two ``cuda_ipc`` endpoints, and the choice of a mapping; no I/O."""

from __future__ import annotations

import secrets
from functools import cache

import msgspec

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal.session.addressing import host_identity
from mooncake_hal.session.authentication import UNREADABLE, decode
from mooncake_hal_cuda.libcuda import HANDLE_BYTES
from mooncake_hal_cuda.memory.memory_kinds import MemoryKind
from mooncake_hal_cuda.memory.nvlink_domain import NvlinkDomain

NAME = "cuda_ipc"
VERSION = 3


class IpcEndpointInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Published info of an endpoint.

    Args:
        host: see ``host_identity``.
        process: random identity of the process.
        device: UUID of its device.
        domain: NVLink domain in which its memory can be mapped; None if only on its host.
    """

    host: str
    process: bytes
    device: bytes
    domain: NvlinkDomain | None


class IpcRegionInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How to map a region: the handles of the allocation that contains it.

    Args:
        offset: offset of the region in the allocation, in bytes.
        nbytes: size of the whole allocation, in bytes.
        ipc: its IPC handle, valid on this host, or empty.
        fabric: its fabric handle, valid in the NVLink domain, or empty.
        has_descriptor: whether the owner sends a descriptor of it on request.
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
            raise ValueError("a region without a handle")
        if not 0 <= self.offset < self.nbytes:
            raise ValueError(f"a region at {self.offset} of an allocation of {self.nbytes} bytes")


class SendDescriptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Request: send a descriptor of the allocation that contains region ``key``.

    Args:
        key: key of the region.
        mailbox: name of the requester's abstract socket that receives the descriptor.
        token: secret to send with the descriptor.
    """

    key: int
    mailbox: str
    token: bytes


@cache
def process_identity() -> bytes:
    """Random identity of this process. It is compared because a process can't open its own IPC
    handles."""
    return secrets.token_bytes(16)


def own_endpoint_info(device: bytes, domain: NvlinkDomain | None) -> IpcEndpointInfo:
    """The published info of an endpoint of this process, on the device with this UUID."""
    return IpcEndpointInfo(host_identity(), process_identity(), device, domain)


def decode_endpoint(data: bytes) -> IpcEndpointInfo:
    """Decode a peer's endpoint info; raises PeerLost if it is malformed."""
    return decode(data, IpcEndpointInfo)


def decode_region(data: bytes) -> IpcRegionInfo:
    """Decode a region's handles; raises PeerLost if they are malformed."""
    return decode(data, IpcRegionInfo)


def decode_call(payload: bytes) -> SendDescriptor:
    """Decode a request; raises TransferError if it is malformed."""
    try:
        return msgspec.msgpack.decode(payload, type=SendDescriptor)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc


def unreachable_reason(ours: IpcEndpointInfo, theirs: IpcEndpointInfo) -> str | None:
    """The reason why one process can't map the other's memory, or None."""
    if ours.host == theirs.host:
        return None
    apart = "they are on different hosts or in different network namespaces"
    if ours.domain is None or theirs.domain is None:
        side = "ours" if ours.domain is None else "the peer's"
        return f"{apart}, and {side} is not memory that NVLink reaches from there"
    if ours.domain != theirs.domain:
        return f"{apart}, and in different NVLink domains ({ours.domain}, {theirs.domain})"
    return None


def mapping_kind(name: IpcRegionInfo, *, is_same_host: bool) -> MemoryKind:
    """Choose how to map a region: by the handle with the fewest system requirements.

    Raises:
        TransportUnavailable: none of its handles is valid on this host.
    """
    if is_same_host and name.has_descriptor:
        return MemoryKind.DESCRIPTOR
    if is_same_host and name.ipc:
        return MemoryKind.IPC
    if name.fabric:
        return MemoryKind.FABRIC
    raise TransportUnavailable(NAME, "the peer's region is not memory that NVLink reaches")
