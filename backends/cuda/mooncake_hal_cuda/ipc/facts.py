"""What two cuda_ipc endpoints tell each other. Pure."""

from __future__ import annotations

import secrets
from functools import cache

import msgspec

from mooncake_hal.transports.handshake import decode
from mooncake_hal.transports.shm.host import host_identity
from mooncake_hal_cuda.driver import HANDLE_BYTES

NAME = "cuda_ipc"
VERSION = 1


class EndpointFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint publishes.

    Args:
        host: see ``shm.host.host_identity``.
        process: random identity of the process.
        device: UUID of its device.
    """

    host: str
    process: bytes
    device: bytes


class RegionName(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a region is mapped.

    Args:
        handle: of the allocation that it lies in.
        offset: where in the allocation it begins, in bytes.
    """

    handle: bytes
    offset: int

    def __post_init__(self) -> None:
        if len(self.handle) != HANDLE_BYTES or self.offset < 0:
            raise ValueError(f"a region needs a handle of {HANDLE_BYTES} bytes and an offset")


@cache
def process_identity() -> bytes:
    """Random identity of this process; a handle can't be opened where it was made."""
    return secrets.token_bytes(16)


def own_facts(device: bytes) -> EndpointFacts:
    """The facts of an endpoint of this process, on the device of that UUID."""
    return EndpointFacts(host_identity(), process_identity(), device)


def decode_facts(data: bytes) -> EndpointFacts:
    """Read a peer's facts; raises PeerLost if they are none."""
    return decode(data, EndpointFacts)


def decode_name(data: bytes) -> RegionName:
    """Read a region's name; raises PeerLost if it is none."""
    return decode(data, RegionName)


def why_unreachable(ours: EndpointFacts, theirs: EndpointFacts) -> str | None:
    """Say why one process can't map the other's memory, or None."""
    if ours.host != theirs.host:
        return "they are on different hosts or in different network namespaces"
    return None
