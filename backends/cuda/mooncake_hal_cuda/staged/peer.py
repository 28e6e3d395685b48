"""A connection to one other staged endpoint."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake_hal.transport import Peer, Spans
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import decode, encode
from mooncake_hal_cuda.copying.copier import Addresses, Copies
from mooncake_hal_cuda.copying.peer import CopyingPeer, left
from mooncake_hal_cuda.copying.worker import Underway, Worker
from mooncake_hal_cuda.staged.messages import (
    SLOT_BYTES,
    SLOTS,
    Gather,
    OpenStaging,
    Scatter,
    Staging,
    packed,
)
from mooncake_hal_cuda.staged.staging import PinnedBuffer

SETUP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Path:
    """What lies between our memory and the peer's.

    Args:
        inner: the tcp connection between the two processes.
        ours: our staging, or None if our regions are host memory.
        theirs: where the peer's staging begins, or None if its regions are host memory.
    """

    inner: Peer
    ours: PinnedBuffer | None
    theirs: int | None

    def spans(self, part: Spans, slot: int) -> Spans:
        """What of it the connection moves: between slots where memory is staged."""
        local, remote = part.local, part.remote
        if self.ours is not None:
            local = packed(self.ours.slot(slot), part.nbytes)
        if self.theirs is not None:
            remote = packed(self.theirs + slot * SLOT_BYTES, part.nbytes)
        return joined(local, remote, part.nbytes)


class StagedPeer(CopyingPeer):
    """Moves parts of up to SLOT_BYTES: packs, sends, unpacks. While one is sent, the one before
    it is unpacked, or the one after it packed.

    Args:
        session: the control connection; closed with it.
        local: our own regions.
        worker: copies.
        path: to the peer; closed with it.
    """

    def __init__(
        self, session: Session, local: AttachedRegions, worker: Worker, path: Path
    ) -> None:
        super().__init__(session, local, worker, SLOT_BYTES)
        self._path = path
        self._next_slot = 0

    def _read(self, part: Spans, deadline: float, copier: Copies) -> Underway:
        self._locate(part, deadline)
        slot, ours = self._take_slot(), self._path.ours
        if self._path.theirs is not None:
            self._call(Gather, part, slot, deadline)
        spans = self._path.spans(part, slot)
        transfer = self._path.inner.read(spans, timeout=left(deadline))

        def finish() -> None:
            transfer.wait()
            if ours is not None:
                ours.scatter(copier, part.local, part.nbytes, slot)

        return Underway(finish, transfer.cancel)

    def _write(self, part: Spans, deadline: float, copier: Copies) -> Underway:
        self._locate(part, deadline)
        slot, ours = self._take_slot(), self._path.ours
        if ours is not None:
            ours.gather(copier, part.local, part.nbytes, slot)
        spans = self._path.spans(part, slot)
        transfer = self._path.inner.write(spans, timeout=left(deadline))

        def finish() -> None:
            transfer.wait()
            if self._path.theirs is not None:
                self._call(Scatter, part, slot, deadline)

        return Underway(finish, transfer.cancel)

    def _take_slot(self) -> int:
        """The slot whose part was finished before the last one began."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % SLOTS
        return slot

    def _let_go(self) -> None:
        self._path.inner.close()
        if self._path.ours is not None:
            self._path.ours.close()

    def _call(self, kind: type[Gather | Scatter], part: Spans, slot: int, deadline: float) -> None:
        call = kind(part.remote.tobytes(), part.nbytes.tobytes(), slot)
        with self._asking(part, deadline):
            self._session.call(encode(call), left(deadline))


def open_staging(session: Session) -> int:
    """Have the peer set staging up; its address over there."""
    return decode(session.call(encode(OpenStaging()), SETUP_SECONDS), Staging).address


def joined(local: Addresses, remote: Addresses, nbytes: Addresses) -> Spans:
    """Spans, one for all pieces if they lie packed on both sides."""
    spans = Spans(local, remote, nbytes)
    together = np.diff(local) == nbytes[:-1]
    if len(nbytes) > 1 and (together & (np.diff(remote) == nbytes[:-1])).all():
        return Spans(local[:1], remote[:1], nbytes.sum(keepdims=True, dtype=np.uint64))
    return spans
