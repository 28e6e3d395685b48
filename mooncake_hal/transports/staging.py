"""Descriptions of the small pieces in a staging buffer, as the two ends of a transport exchange
them.

A transport whose hardware moves only long runs, or only host memory, packs many small pieces into a
staging buffer, moves the buffer, and lets the other end scatter it. A peer's description of a
buffer is validated here before anything is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from mooncake_hal.errors import TransferError
from mooncake_hal.transports.strided_pieces import U64, num_levels, pack_strides, unpack_strides

MAX_PIECES = 1 << 16
"""Maximum number of pieces in a buffer."""


class PackedPieces(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Description of pieces that are packed into a buffer, for the other end.

    Args:
        rows: the rows of ``strided_pieces``, as bytes.
        levels: number of levels of the rows.
    """

    rows: bytes
    levels: int

    @classmethod
    def of(cls, addresses: U64, nbytes: U64) -> PackedPieces:
        """Describe [pieces] addresses and lengths, at least one."""
        rows = pack_strides(addresses, nbytes)
        return cls(rows.tobytes(), num_levels(rows))


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """Number and size of a transport's staging buffers.

    Args:
        transport: name of the transport, for messages.
        slots: buffers per connection, used in turn.
        slot_bytes: size of each buffer in bytes.
    """

    transport: str
    slots: int
    slot_bytes: int

    def read_pieces(self, slot: int, pieces: PackedPieces) -> tuple[U64, U64]:
        """Decode and validate a peer's description of a buffer's pieces: [n] addresses and [n]
        lengths, both writable arrays.

        Args:
            slot: index of the buffer.
            pieces: the peer's description.

        Raises:
            TransferError: the description is malformed, the pieces exceed the buffer, or there is
                no such buffer.
        """
        name = self.transport
        if not 0 <= slot < self.slots:
            raise TransferError(f"{name}: there are {self.slots} buffers, {slot} is none of them")
        try:
            places, sizes = unpack_strides(pieces.rows, pieces.levels, MAX_PIECES)
        except ValueError as exc:
            raise TransferError(f"{name}: a buffer's pieces can't be read: {exc}") from exc
        # the maximum is checked first, since a sum of uint64 may wrap around
        if not sizes.all() or sizes.max() > self.slot_bytes or sizes.sum() > self.slot_bytes:
            raise TransferError(f"{name}: pieces must have 1 to {self.slot_bytes} bytes together")
        return places, sizes


def packed_addresses(base: int, nbytes: U64) -> U64:
    """Addresses of pieces that are packed one after the other from ``base`` on: [n]."""
    begins: U64 = np.cumsum(nbytes, dtype=np.uint64) - nbytes + np.uint64(base)
    return begins
