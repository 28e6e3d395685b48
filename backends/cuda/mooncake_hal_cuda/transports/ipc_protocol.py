"""Messages between two cuda_ipc endpoints. Pure."""

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
    """What an endpoint publishes.

    Args:
        host: see ``host_identity``.
        process: random identity of the process.
        device: UUID of its device.
        domain: NVLink domain in which its memory can be mapped, or None if on its host alone.
    """

    host: str
    process: bytes
    device: bytes
    domain: NvlinkDomain | None


class IpcRegionInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a region is mapped: the handles of the allocation that it lies in.

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
            raise ValueError("a region without a handle")
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


def own_endpoint_info(device: bytes, domain: NvlinkDomain | None) -> IpcEndpointInfo:
    """What an endpoint of this process publishes, on the device of that UUID."""
    return IpcEndpointInfo(host_identity(), process_identity(), device, domain)


def decode_endpoint(data: bytes) -> IpcEndpointInfo:
    """Read what a peer published; raises PeerLost if it is something else."""
    return decode(data, IpcEndpointInfo)


def decode_region(data: bytes) -> IpcRegionInfo:
    """Read a region's name; raises PeerLost if it is none."""
    return decode(data, IpcRegionInfo)


def decode_call(payload: bytes) -> SendDescriptor:
    """Read a call; raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(payload, type=SendDescriptor)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc


def why_unreachable(ours: IpcEndpointInfo, theirs: IpcEndpointInfo) -> str | None:
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


def mapping_kind(name: IpcRegionInfo, *, is_same_host: bool) -> MemoryKind:
    """How to map a region: the way that needs the least of the system.

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
