"""A connection to one other staged endpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from mooncake_hal.errors import PeerLost, TransferError, TransferTimeout
from mooncake_hal.transport import Peer, Spans
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import decode, encode
from mooncake_hal_cuda.copying.copier import Addresses, Copies
from mooncake_hal_cuda.copying.peer import CopyingPeer
from mooncake_hal_cuda.copying.worker import Worker
from mooncake_hal_cuda.staged.messages import (
    STAGING_BYTES,
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


class StagedPeer(CopyingPeer):
    """Moves parts of up to STAGING_BYTES: packs, sends, unpacks.

    Args:
        session: the control connection; closed with it.
        local: our own regions.
        worker: copies.
        path: to the peer; closed with it.
    """

    def __init__(
        self, session: Session, local: AttachedRegions, worker: Worker, path: Path
    ) -> None:
        super().__init__(session, local, worker, STAGING_BYTES)
        self._path = path

    def _read(self, part: Spans, deadline: float, copier: Copies) -> None:
        self._locate(part, deadline)
        path, remote, local = self._path, part.remote, part.local
        if path.theirs is not None:
            self._call(Gather, part, deadline)
            remote = packed(path.theirs, part.nbytes)
        if path.ours is not None:
            local = packed(path.ours.address, part.nbytes)
        spans = joined(local, remote, part.nbytes)
        path.inner.read(spans, timeout=_left(deadline)).wait()
        if path.ours is not None:
            path.ours.scatter(copier, part.local, part.nbytes)

    def _write(self, part: Spans, deadline: float, copier: Copies) -> None:
        self._locate(part, deadline)
        path, remote, local = self._path, part.remote, part.local
        if path.ours is not None:
            path.ours.gather(copier, local, part.nbytes)
            local = packed(path.ours.address, part.nbytes)
        if path.theirs is not None:
            remote = packed(path.theirs, part.nbytes)
        spans = joined(local, remote, part.nbytes)
        path.inner.write(spans, timeout=_left(deadline)).wait()
        if path.theirs is not None:
            self._call(Scatter, part, deadline)

    def _let_go(self) -> None:
        self._path.inner.close()
        if self._path.ours is not None:
            self._path.ours.close()

    def _call(self, kind: type[Gather | Scatter], part: Spans, deadline: float) -> None:
        call = kind(part.remote.tobytes(), part.nbytes.tobytes())
        try:
            self._session.call(encode(call), _left(deadline))
        except (PeerLost, TransferTimeout):
            raise
        except TransferError:
            self._session.barrier(_left(deadline))  # what it has revoked we know after this
            self._locate(part, deadline)
            raise


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


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TransferTimeout("the deadline passed; drained")
    return left
