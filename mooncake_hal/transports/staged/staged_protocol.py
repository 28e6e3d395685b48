"""Messages between two staged endpoints. Pure."""

from __future__ import annotations

import msgspec

from mooncake_hal.errors import TransferError
from mooncake_hal.session.authentication import UNREADABLE, decode
from mooncake_hal.transports.staging import PackedPieces, StagingLimits

NAME = "staged"
VERSION = 6

SLOTS = 2
"""Of a peer's staging on either side: one is packed or unpacked while the other one travels."""
SLOT_BYTES = 8 << 20
"""A transfer's parts are no larger."""
LIMITS = StagingLimits(NAME, SLOTS, SLOT_BYTES)


class StagedEndpointInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint publishes.

    Args:
        inner: addresses of its inner endpoints, by transport.
    """

    inner: dict[str, bytes]


class OpenStaging(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Call: set up what this connection needs, once: staging memory, or host memory's reach."""


class Gather(msgspec.Struct, frozen=True, tag="gather", forbid_unknown_fields=True):
    """Call: pack pieces of device memory into a slot."""

    pieces: PackedPieces
    slot: int


class Scatter(msgspec.Struct, frozen=True, tag="scatter", forbid_unknown_fields=True):
    """Call: unpack a slot into pieces of device memory."""

    pieces: PackedPieces
    slot: int


class StagingOpened(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to OpenStaging.

    Args:
        address: of the staging memory; None if the regions are host memory, which the inner
            transport reaches itself.
        inner: addresses of those inner endpoints that could register what they have to.
    """

    address: int | None
    inner: dict[str, bytes]


def decode_call(payload: bytes) -> OpenStaging | Gather | Scatter:
    """Read a call; raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(payload, type=OpenStaging | Gather | Scatter)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc


def decode_endpoint(data: bytes) -> StagedEndpointInfo:
    """Read what a peer published; raises PeerLost if it is something else."""
    return decode(data, StagedEndpointInfo)
