"""What two staged endpoints say to each other. Pure."""

from __future__ import annotations

import msgspec
import numpy as np

from mooncake_hal.errors import TransferError
from mooncake_hal.transports.handshake import UNREADABLE, decode
from mooncake_hal_cuda.copying.copier import Addresses

NAME = "staged"
VERSION = 2

SLOTS = 2
"""Of a peer's staging on either side: one is packed or unpacked while the other one travels."""
SLOT_BYTES = 8 << 20
"""A transfer's parts are no larger."""


class EndpointFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint publishes.

    Args:
        inner: address of its tcp endpoint.
        is_host: whether its regions are host memory, which tcp reaches itself.
    """

    inner: bytes
    is_host: bool


class OpenStaging(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Call: set staging memory up for this connection; its address is the answer."""


class Gather(msgspec.Struct, frozen=True, tag="gather", forbid_unknown_fields=True):
    """Call: pack pieces of device memory into a slot; uint64 arrays as bytes."""

    addresses: bytes
    nbytes: bytes
    slot: int


class Scatter(msgspec.Struct, frozen=True, tag="scatter", forbid_unknown_fields=True):
    """Call: unpack a slot into pieces of device memory; uint64 arrays as bytes."""

    addresses: bytes
    nbytes: bytes
    slot: int


class Staging(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to OpenStaging."""

    address: int


def decode_call(payload: bytes) -> OpenStaging | Gather | Scatter:
    """Read a call; raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(payload, type=OpenStaging | Gather | Scatter)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc


def decode_facts(data: bytes) -> EndpointFacts:
    """Read a peer's facts; raises PeerLost if they are none."""
    return decode(data, EndpointFacts)


def pieces_of(call: Gather | Scatter) -> tuple[Addresses, Addresses]:
    """(addresses, lengths) of a call.

    Raises:
        TransferError: they are no pieces, or more than a slot holds, or there is no such slot.
    """
    if not 0 <= call.slot < SLOTS:
        raise TransferError(f"{NAME}: there are {SLOTS} slots, slot {call.slot} was asked for")
    if len(call.addresses) != len(call.nbytes) or len(call.nbytes) % 8 or not call.nbytes:
        raise TransferError(f"{NAME}: a call with arrays of different or odd sizes")
    arrays = (np.frombuffer(data, np.uint64).copy() for data in (call.addresses, call.nbytes))
    addresses, nbytes = arrays
    if not nbytes.all() or nbytes.max() > SLOT_BYTES or nbytes.sum() > SLOT_BYTES:
        raise TransferError(f"{NAME}: pieces must have 1 to {SLOT_BYTES} bytes together")
    return addresses, nbytes


def packed(base: int, nbytes: Addresses) -> Addresses:
    """Where pieces lie that are packed from ``base`` on."""
    begins: Addresses = np.cumsum(nbytes, dtype=np.uint64) - nbytes + np.uint64(base)
    return begins
