"""Buffers of ours that peers write whole runs into, and that are spread when they ask for it."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from mooncake_hal.errors import TransferError
from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import encode
from mooncake_hal_ascend.hccs.messages import SLOTS, Borrow, Lent, Spread, decode_call
from mooncake_hal_ascend.hccs.runs import BUFFER_BYTES, is_row, row_bytes
from mooncake_hal_ascend.hccs.settings import NAME
from mooncake_hal_ascend.hccs.spreading import Spreader

MAX_BORROWERS = 16
"""Prefill ranks that push many small pieces to one of decode's; others write piece by piece."""
LENT_BYTES = SLOTS * BUFFER_BYTES


class Landing:
    """See ``Attendant``: what an endpoint lends to those that write to it.

    Args:
        memory: of all buffers, flat uint8; registered with the engine.
        spreader: empties them.
    """

    def __init__(self, memory: Tensor, spreader: Spreader) -> None:
        self._spreader = spreader
        # What came back last is lent last: a peer that died may have begun a write into it.
        self._free = deque(
            memory[begin : begin + LENT_BYTES] for begin in range(0, memory.numel(), LENT_BYTES)
        )
        self._lent: dict[Session, Tensor] = {}

    def takes(self, region: MemoryRegion) -> bool:
        """Whether it can spread over a region."""
        return self._spreader.takes(region.address)

    def answer(self, session: Session, payload: bytes, local: AttachedRegions) -> bytes:
        """See ``Attendant``."""
        call = decode_call(payload)
        if isinstance(call, Borrow):
            return encode(Lent(self._lend(session).data_ptr()))
        self._spread(session, call, local)
        return b""

    def departed(self, session: Session) -> None:
        """See ``Attendant``: what it had borrowed is free again."""
        if (buffers := self._lent.pop(session, None)) is not None:
            self._free.append(buffers)

    def _lend(self, session: Session) -> Tensor:
        if session not in self._lent:
            if not self._free:
                raise TransferError(
                    f"{NAME}: all buffers are lent, to {len(self._lent)} peers that push"
                )
            self._lent[session] = self._free.popleft()
        return self._lent[session]

    def _spread(self, session: Session, call: Spread, local: AttachedRegions) -> None:
        """Copy to regions that are live at this moment; all is there when this returns."""
        if session not in self._lent:
            raise TransferError(f"{NAME}: buffers are borrowed first")
        places, sizes = call.pieces()
        index, at = local.locate(places, sizes)
        base = index.starts[at[0]]
        if (at != at[0]).any() or not self._spreader.takes(base):
            raise TransferError(f"{NAME}: pieces must lie in one region that takes runs")
        if not is_row(row := row_bytes(places, sizes, base)):
            raise TransferError(f"{NAME}: pieces in rows of {row} bytes are not spread")
        buffer = self._lent[session][call.slot * BUFFER_BYTES :][:BUFFER_BYTES]
        self._spreader.spread(buffer, places, sizes, base)()
