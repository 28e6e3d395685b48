"""A connection to one other endpoint: its memory, mapped, and the transfers in it."""

from __future__ import annotations

import threading
import time

import numpy as np

from mooncake_hal.errors import (
    DeviceError,
    OutOfBounds,
    PeerLost,
    RegionRevoked,
    RegionUnknown,
    TransferError,
    TransportUnavailable,
)
from mooncake_hal.transport import Spans, Transfer
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.regions import check_spans
from mooncake_hal.transports.transfers import DONE
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.ipc.copier import Addresses
from mooncake_hal_cuda.ipc.facts import NAME, decode_name
from mooncake_hal_cuda.ipc.worker import Job, Worker


class Mappings:
    """The peer's regions as this process sees them.

    Args:
        driver: maps them, in the context of device ``index``.
        is_own: whether the peer is this very process, whose addresses are good as they are.
    """

    def __init__(self, driver: CudaDriver, index: int, is_own: bool) -> None:
        self._driver = driver
        self._index = index
        self._is_own = is_own
        self._bases: dict[int, int] = {}
        self._opened: dict[int, int] = {}
        self._lock = threading.Lock()

    def base(self, key: int, start: int, attachment: bytes) -> int:
        """Where region ``key``, which begins at ``start`` over there, begins here.

        Raises:
            TransportUnavailable: this process can't map it.
        """
        with self._lock:
            if self._is_own:
                return start
            if key not in self._bases:
                name = decode_name(attachment)
                try:
                    self._driver.bind(self._index)
                    self._opened[key] = self._driver.open(name.handle)
                except DeviceError as exc:
                    raise TransportUnavailable(NAME, f"the peer's memory: {exc}") from exc
                self._bases[key] = self._opened[key] + name.offset
            return self._bases[key]

    def close(self) -> None:
        """Unmap everything; the owner may free it then."""
        with self._lock:
            opened, self._opened, self._bases = self._opened, {}, {}
            if opened:
                self._driver.bind(self._index)
            for address in opened.values():
                self._driver.close(address)


class IpcPeer:
    """See ``Peer``.

    Args:
        session: the control connection; closed with it.
        local: our own regions.
        mappings: of the peer's.
        worker: copies.
    """

    def __init__(
        self, session: Session, local: AttachedRegions, mappings: Mappings, worker: Worker
    ) -> None:
        self._session = session
        self._local = local
        self._mappings = mappings
        self._worker = worker
        self._jobs: set[Job] = set()
        self._error: TransferError | None = None
        self._lock = threading.Lock()
        self.closed = False

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        """See ``Peer``."""
        return self._start(spans, False, timeout)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        """See ``Peer``."""
        return self._start(spans, True, timeout)

    def close(self) -> None:
        """See ``Peer``."""
        self.closed = True
        self.lost(PeerLost("the connection was closed on this side"))
        self._session.close()

    def lost(self, error: TransferError) -> None:
        """Fail and drain everything, and let go of the peer's memory. Idempotent."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            jobs, self._jobs = list(self._jobs), set()
        for job in jobs:
            job.transfer.abort(error)
        self._mappings.close()

    def withdraw(self, key: int) -> None:
        """End every transfer that touches our region ``key``; drained when this returns."""
        with self._lock:
            touched = [job for job in self._jobs if key in job.local_keys]
        for job in touched:
            job.transfer.abort(RegionRevoked(f"region {key} was revoked in mid-transfer"))

    def _start(self, spans: Spans, is_write: bool, timeout: float) -> Transfer:
        check_spans(spans)
        if self._error is not None:
            raise self._error
        if not len(spans):
            return DONE
        index, at = self._local.locate(spans.local, spans.nbytes)
        keys = frozenset(index.keys[position] for position in np.unique(at).tolist())
        job = Job(spans, is_write, timeout, self._mapped, keys)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._jobs = {old for old in self._jobs if not old.is_over} | {job}
        self._worker.submit(job)
        return job.transfer

    def _mapped(self, spans: Spans, deadline: float) -> Addresses:
        """See ``Locate``. Regions that we have not heard of are asked for once."""
        try:
            index, at = self._session.regions.locate(spans.remote, spans.nbytes)
        except (RegionUnknown, OutOfBounds):
            self._session.barrier(max(0.0, deadline - time.monotonic()))
            index, at = self._session.regions.locate(spans.remote, spans.nbytes)
        used = set(np.unique(at).tolist())
        attachments = self._session.regions.attachments(index.keys)
        shifts = [
            self._mappings.base(key, start, name) - start if position in used else 0
            for position, (key, start, name) in enumerate(
                zip(index.keys, index.starts, attachments, strict=True)
            )
        ]
        moved: Addresses = spans.remote + np.array(shifts, np.int64).astype(np.uint64)[at]
        return moved
