"""A connection to one other endpoint: its memory, mapped, and the transfers in it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mooncake_hal.transport import Spans
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal_cuda.copying.copier import Addresses, Copies, Route
from mooncake_hal_cuda.copying.peer import CopyingPeer
from mooncake_hal_cuda.copying.worker import Underway, Worker
from mooncake_hal_cuda.ipc.mappings import Mappings

PIECE_BYTES = 256 << 20
"""Copied between two looks at the deadline: about a millisecond on NVLink, ten on PCIe. While one
part is copied, the next one is prepared."""


class IpcPeer(CopyingPeer):
    """A peer whose memory is mapped here.

    Args:
        session: the control connection; closed with it.
        local: our own regions.
        worker: copies.
        mappings: of the peer's regions.
        route: between the two devices.
    """

    def __init__(
        self,
        session: Session,
        local: AttachedRegions,
        worker: Worker,
        mappings: Mappings,
        route: Route,
    ) -> None:
        super().__init__(session, local, worker, PIECE_BYTES)
        self._mappings = mappings
        self._route = route

    def _read(self, part: Spans, deadline: float, copier: Copies) -> Underway:
        theirs = self._mapped(part, deadline, copier)
        copier.copy(part.local, theirs, part.nbytes, self._route)
        return _until(copier.mark())

    def _write(self, part: Spans, deadline: float, copier: Copies) -> Underway:
        theirs = self._mapped(part, deadline, copier)
        copier.copy(theirs, part.local, part.nbytes, self._route)
        return _until(copier.mark())

    def _confirm(self, spans: Spans, deadline: float) -> None:
        """Memory of a dead peer stays mapped, and revoked memory too: ask whether all is well."""
        self._session.barrier(max(0.0, deadline - time.monotonic()))
        self._session.regions.locate(spans.remote, spans.nbytes)

    def _let_go(self) -> None:
        self._mappings.close()

    def _mapped(self, part: Spans, deadline: float, copier: Copies) -> Addresses:
        """Where the remote pieces are mapped: [n]."""
        index, at = self._locate(part, deadline)
        live = set(index.keys)
        if self._mappings.has_others(live):
            copier.drain()  # the part before this one may be in them
            self._mappings.forget(live)
        used = index.touched(at)
        attachments = self._session.regions.attachments(index.keys)
        regions = zip(index.keys, index.starts, attachments, strict=True)
        with self._asking(part, deadline):
            shifts = [
                self._mappings.base(key, start, name) - start if key in used else 0
                for key, start, name in regions
            ]
        moved: Addresses = part.remote + np.array(shifts, np.int64).astype(np.uint64)[at]
        return moved


def _until(copied: Callable[[], None]) -> Underway:
    """A part that can't be called back: finished or given up, it is waited for."""
    return Underway(copied, copied)
