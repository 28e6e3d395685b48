"""Messages between two staged endpoints. Pure."""

from __future__ import annotations

import msgspec

from mooncake_hal.errors import TransferError
from mooncake_hal.session.authentication import UNREADABLE, decode
from mooncake_hal.transports.staging import PackedPieces, StagingLimits

NAME = "staged"
VERSION = 6

SLOTS = 2
"""Slots in a peer's staging buffer on either side: one is packed or unpacked while the other one is
sent."""
SLOT_BYTES = 8 << 20
"""Size of a slot, and maximum size of a transfer's parts."""
LIMITS = StagingLimits(NAME, SLOTS, SLOT_BYTES)


class StagedEndpointInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The info that an endpoint publishes.

    Args:
        inner: addresses of its inner endpoints, by transport.
    """

    inner: dict[str, bytes]


class OpenStaging(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Call, once per connection: allocate a staging buffer, or register the host memory with the
    inner endpoints."""


class Gather(msgspec.Struct, frozen=True, tag="gather", forbid_unknown_fields=True):
    """Call: copy pieces of device memory to a slot, packed."""

    pieces: PackedPieces
    slot: int


class Scatter(msgspec.Struct, frozen=True, tag="scatter", forbid_unknown_fields=True):
    """Call: copy the packed content of a slot to pieces of device memory."""

    pieces: PackedPieces
    slot: int


class StagingOpened(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reply to OpenStaging.

    Args:
        address: address of the staging buffer; None if the regions are host memory, which the inner
            transport accesses directly.
        inner: addresses of the inner endpoints that could register the memory, by transport.
    """

    address: int | None
    inner: dict[str, bytes]


def decode_call(payload: bytes) -> OpenStaging | Gather | Scatter:
    """Decode a call; raises TransferError if it is invalid."""
    try:
        return msgspec.msgpack.decode(payload, type=OpenStaging | Gather | Scatter)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc


def decode_endpoint(data: bytes) -> StagedEndpointInfo:
    """Decode an endpoint's published info; raises PeerLost if it is invalid."""
    return decode(data, StagedEndpointInfo)
