"""Base class of peers whose transfers this process copies itself, on a worker thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import PeerLost, RegionRevoked, TransferError, TransferTimeout
from mooncake_hal.session.regions import AttachedRegions, RegionIndex, check_spans
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Spans, Transfer
from mooncake_hal.transports.copy_worker import C, CopyJob, CopyWorker, InFlightPart, PartMover
from mooncake_hal.transports.spans import cut
from mooncake_hal.transports.transfers import DONE


class CopyingPeer(Generic[C]):
    """A peer whose transfers a worker thread copies part by part; subclasses move a part.

    Args:
        session: session to the other end; closed with the peer.
        local: this endpoint's regions.
        worker: executes the transfers; closed with the peer.
        max_bytes: maximum size of a part in bytes.
    """

    def __init__(
        self, session: Session, local: AttachedRegions, worker: CopyWorker[C], max_bytes: int
    ) -> None:
        self._session = session
        self._local = local
        self._worker = worker
        self._max_bytes = max_bytes
        self._jobs: set[CopyJob[C]] = set()
        self._error: TransferError | None = None
        self._lock = threading.Lock()
        self.closed = False

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._start(spans, timeout, is_write=False)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._start(spans, timeout, is_write=True)

    def close(self) -> None:
        self.closed = True
        self.lost(PeerLost("the connection was closed on this side"))
        self._session.close()

    def lost(self, error: TransferError) -> None:
        """Fail and drain all transfers, and release the peer's resources. Idempotent."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            jobs, self._jobs = list(self._jobs), set()
        for job in jobs:
            job.transfer.abort(error)
        self._worker.close()
        self._let_go()

    def withdraw(self, key: int) -> None:
        """Fail every transfer that touches our region ``key``; they are drained when this
        returns."""
        with self._lock:
            touched = [job for job in self._jobs if key in job.local_keys]
        for job in touched:
            job.transfer.abort(RegionRevoked(f"region {key} was revoked in mid-transfer"))

    def _read(self, part: Spans, deadline: float, copier: C) -> InFlightPart:
        raise NotImplementedError

    def _write(self, part: Spans, deadline: float, copier: C) -> InFlightPart:
        raise NotImplementedError

    def _confirm(self, spans: Spans, deadline: float) -> None:
        """Check a transfer whose parts have all been moved. By default there is nothing to do:
        every part was checked."""

    def _let_go(self) -> None:
        raise NotImplementedError

    def _start(self, spans: Spans, timeout: float, *, is_write: bool) -> Transfer:
        check_spans(spans)
        if self._error is not None:
            raise self._error
        if not len(spans):
            return DONE
        index, at = self._local.locate(spans.local, spans.nbytes)
        keys = index.touched(at)
        way = PartMover(self._write if is_write else self._read, self._confirm, self._max_bytes)
        pieces = cut(spans.local, spans.remote, spans.nbytes, self._max_bytes)
        spans = Spans(pieces.local, pieces.remote, pieces.nbytes)
        job = CopyJob(spans, timeout, way, keys)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._jobs = {old for old in self._jobs if not old.is_over} | {job}
        self._worker.submit(job)
        return job.transfer

    @contextmanager
    def _asking(self, part: Spans, deadline: float) -> Iterator[None]:
        """Context of requests about a part: if the peer rejects one because the memory was revoked,
        raises RegionRevoked instead."""
        try:
            yield
        except (PeerLost, TransferTimeout):
            raise
        except TransferError:
            self._session.barrier(seconds_left(deadline))  # after it, all revocations have arrived
            self._locate(part, deadline)
            raise

    def _locate(self, part: Spans, deadline: float) -> tuple[RegionIndex, NDArray[np.intp]]:
        return self._session.locate(part.remote, part.nbytes, deadline - time.monotonic())


def seconds_left(deadline: float) -> float:
    """Seconds until a deadline of the monotonic clock.

    Raises:
        TransferTimeout: the deadline has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TransferTimeout("the deadline passed; drained")
    return seconds
