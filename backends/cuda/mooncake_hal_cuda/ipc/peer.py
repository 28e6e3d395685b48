"""A connection to one other endpoint: its memory, mapped, and the transfers in it."""

from __future__ import annotations

import time

import numpy as np

from mooncake_hal.transport import Spans
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal_cuda.copying.copier import Addresses, Copies
from mooncake_hal_cuda.copying.peer import CopyingPeer
from mooncake_hal_cuda.copying.worker import Worker
from mooncake_hal_cuda.ipc.mappings import Mappings

PIECE_BYTES = 256 << 20
"""Copied between two looks at the deadline: about a millisecond on NVLink, ten on PCIe."""


class IpcPeer(CopyingPeer):
    """A peer whose memory is mapped here.

    Args:
        session: the control connection; closed with it.
        local: our own regions.
        worker: copies.
        mappings: of the peer's regions.
    """

    def __init__(
        self, session: Session, local: AttachedRegions, worker: Worker, mappings: Mappings
    ) -> None:
        super().__init__(session, local, worker, PIECE_BYTES)
        self._mappings = mappings

    def _read(self, part: Spans, deadline: float, copier: Copies) -> None:
        copier.copy(part.local, self._mapped(part, deadline), part.nbytes)
        copier.drain()
        self._confirm(part, deadline)

    def _write(self, part: Spans, deadline: float, copier: Copies) -> None:
        copier.copy(self._mapped(part, deadline), part.local, part.nbytes)
        copier.drain()
        self._confirm(part, deadline)

    def _confirm(self, part: Spans, deadline: float) -> None:
        """Memory of a dead peer stays mapped, and revoked memory too: ask whether all is well."""
        self._session.barrier(max(0.0, deadline - time.monotonic()))
        self._session.regions.locate(part.remote, part.nbytes)

    def _let_go(self) -> None:
        self._mappings.close()

    def _mapped(self, part: Spans, deadline: float) -> Addresses:
        """Where the remote pieces are mapped: [n]."""
        index, at = self._locate(part, deadline)
        self._mappings.forget(set(index.keys))  # one part at a time: nothing else is under way
        used = set(np.unique(at).tolist())
        attachments = self._session.regions.attachments(index.keys)
        shifts = [
            self._mappings.base(key, start, name) - start if position in used else 0
            for position, (key, start, name) in enumerate(
                zip(index.keys, index.starts, attachments, strict=True)
            )
        ]
        moved: Addresses = part.remote + np.array(shifts, np.int64).astype(np.uint64)[at]
        return moved
