"""Packing many small pieces into a staging buffer: what both ends exchange.

A transport whose hardware moves long runs, or host memory, packs many small pieces into a buffer,
moves the buffer, and has the other end scatter it. What a peer says about such a buffer is checked
here before anything is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from mooncake_hal.errors import TransferError
from mooncake_hal.transports.strided_pieces import U64, num_levels, pack_strides, unpack_strides

MAX_PIECES = 1 << 16
"""Of a buffer."""


class PackedPieces(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pieces that lie one behind the other in a buffer, as they are described to the other end.

    Args:
        rows: see ``strided_pieces``.
        levels: of the rows.
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
    """What a transport's buffers hold.

    Args:
        transport: its name, for messages.
        slots: buffers of a connection, which take turns.
        slot_bytes: of each.
    """

    transport: str
    slots: int
    slot_bytes: int

    def read_pieces(self, slot: int, pieces: PackedPieces) -> tuple[U64, U64]:
        """What a peer says of a buffer's pieces: [n] addresses and [n] lengths, to be written to.

        Args:
            slot: which buffer.
            pieces: described.

        Raises:
            TransferError: they are no pieces, or more than a buffer holds, or there is none such.
        """
        name = self.transport
        if not 0 <= slot < self.slots:
            raise TransferError(f"{name}: there are {self.slots} buffers, {slot} is none of them")
        try:
            places, sizes = unpack_strides(pieces.rows, pieces.levels, MAX_PIECES)
        except ValueError as exc:
            raise TransferError(f"{name}: a buffer's pieces can't be read: {exc}") from exc
        # the largest one first: a sum of uint64 may wrap around
        if not sizes.all() or sizes.max() > self.slot_bytes or sizes.sum() > self.slot_bytes:
            raise TransferError(f"{name}: pieces must have 1 to {self.slot_bytes} bytes together")
        return places, sizes


def packed_addresses(base: int, nbytes: U64) -> U64:
    """Where pieces lie that are packed from ``base`` on: [n]."""
    begins: U64 = np.cumsum(nbytes, dtype=np.uint64) - nbytes + np.uint64(base)
    return begins
