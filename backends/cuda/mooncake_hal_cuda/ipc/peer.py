"""A connection to one other endpoint: its memory, mapped, and the transfers in it."""

from __future__ import annotations

import threading
import time

import numpy as np

from mooncake_hal.errors import DeviceError, TransportUnavailable
from mooncake_hal.transport import Spans
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal_cuda.copying.copier import Addresses, Copies
from mooncake_hal_cuda.copying.peer import CopyingPeer
from mooncake_hal_cuda.copying.worker import Worker
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.ipc.facts import NAME, decode_name

PIECE_BYTES = 256 << 20
"""Copied between two looks at the deadline: about a millisecond on NVLink, ten on PCIe."""


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
