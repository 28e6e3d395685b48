"""What the two ends of a connection say to each other beside what every adapter says. Pure.

Who writes many small pieces borrows two buffers of the receiver's, fills them by its engine with
whole runs, and asks for each to be spread.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from mooncake_hal.errors import TransferError
from mooncake_hal.transports.handshake import UNREADABLE
from mooncake_hal_ascend.hccs.runs import BUFFER_BYTES, U64
from mooncake_hal_ascend.hccs.settings import NAME

SLOTS = 2
"""Buffers that are lent together: one is filled while the other is spread."""


class RegionFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint tells of a region.

    Args:
        address: its first byte.
        takes_runs: whether pieces of it may be written by way of borrowed buffers.
    """

    address: int
    takes_runs: bool


class Borrow(msgspec.Struct, frozen=True, tag="borrow", forbid_unknown_fields=True):
    """Call: lend this connection the buffers; it has the same ones until it ends."""


class Lent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer to Borrow: where the first buffer begins; the second one lies behind it."""

    address: int


class Spread(msgspec.Struct, frozen=True, tag="spread", forbid_unknown_fields=True):
    """Call: copy what a buffer holds to its places; they are there when the answer comes.

    Args:
        slot: which buffer.
        places, sizes: of the pieces, that lie one behind the other in it; uint64 arrays as bytes.
    """

    slot: int
    places: bytes
    sizes: bytes

    def pieces(self) -> tuple[U64, U64]:
        """Return (places, sizes).

        Raises:
            TransferError: they are none that lie in such a buffer.
        """
        if not 0 <= self.slot < SLOTS:
            raise TransferError(f"{NAME}: there are {SLOTS} buffers, {self.slot} is none of them")
        if len(self.places) != len(self.sizes) or len(self.sizes) % 8 or not self.sizes:
            raise TransferError(f"{NAME}: {len(self.places)} and {len(self.sizes)} bytes of pieces")
        places, sizes = (np.frombuffer(data, np.uint64) for data in (self.places, self.sizes))
        if not sizes.all() or sizes.max() > BUFFER_BYTES or sizes.sum() > BUFFER_BYTES:
            raise TransferError(f"{NAME}: pieces must have 1 to {BUFFER_BYTES} bytes together")
        return places, sizes


Told = TypeVar("Told", bound=msgspec.Struct)


def decode_call(payload: bytes) -> Borrow | Spread:
    """Read a call; raises TransferError if it is none."""
    try:
        return msgspec.msgpack.decode(payload, type=Borrow | Spread)
    except UNREADABLE as exc:
        raise TransferError(f"{NAME}: a call can't be read: {exc}") from exc
