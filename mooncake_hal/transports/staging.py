"""Packing many small pieces into a staging buffer: what both ends exchange.

A transport whose hardware moves long runs, or host memory, packs many small pieces into a buffer,
moves the buffer, and has the other end scatter it. What a peer says about such a buffer is checked
here before anything is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import TransferError

U64 = NDArray[np.uint64]


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

    def read_pieces(self, slot: int, addresses: bytes, nbytes: bytes) -> tuple[U64, U64]:
        """What a peer says of a buffer's pieces: [n] addresses and [n] lengths, to be written to.

        Args:
            slot: which buffer.
            addresses, nbytes: uint64 arrays as bytes.

        Raises:
            TransferError: they are no pieces, or more than a buffer holds, or there is none such.
        """
        name = self.transport
        if not 0 <= slot < self.slots:
            raise TransferError(f"{name}: there are {self.slots} buffers, {slot} is none of them")
        if len(addresses) != len(nbytes) or len(nbytes) % 8 or not nbytes:
            raise TransferError(f"{name}: {len(addresses)} and {len(nbytes)} bytes of pieces")
        places, sizes = (np.frombuffer(data, np.uint64).copy() for data in (addresses, nbytes))
        # the largest one first: a sum of uint64 may wrap around
        if not sizes.all() or sizes.max() > self.slot_bytes or sizes.sum() > self.slot_bytes:
            raise TransferError(f"{name}: pieces must have 1 to {self.slot_bytes} bytes together")
        return places, sizes


def packed_addresses(base: int, nbytes: U64) -> U64:
    """Where pieces lie that are packed from ``base`` on: [n]."""
    begins: U64 = np.cumsum(nbytes, dtype=np.uint64) - nbytes + np.uint64(base)
    return begins
