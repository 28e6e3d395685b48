"""Registered regions, each with what is needed to reach it; safe to use from any thread."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.transport import MemoryRegion
from mooncake_hal.transports.regions import RegionIndex, RegionTable


class AttachedRegions:
    """A region table whose entries carry bytes that only the transport understands.

    Args:
        whose: how messages name the side that registered.
    """

    def __init__(self, whose: str) -> None:
        self._table = RegionTable(whose)
        self._attachments: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def require_room(self, region: MemoryRegion) -> None:
        """Refuse a region that can't be added: raises ValueError, see ``RegionTable``."""
        with self._lock:
            self._table.require_room(region)

    def add(self, key: int, region: MemoryRegion, attachment: bytes) -> None:
        """Add a region.

        Raises:
            ValueError: it is empty or overlaps another one.
        """
        with self._lock:
            self._table.add(key, region)
            self._attachments[key] = attachment

    def revoke(self, key: int) -> None:
        """Take a region out; raises RegionUnknown or RegionRevoked if there is none."""
        with self._lock:
            self._table.revoke(key)
            del self._attachments[key]

    def locate(
        self,
        addresses: NDArray[np.uint64],  # [n]
        nbytes: NDArray[np.uint64],  # [n]
    ) -> tuple[RegionIndex, NDArray[np.intp]]:
        """Return an index and, for each span, the position of its region in it: [n].

        Raises:
            RegionUnknown, RegionRevoked, OutOfBounds: for the first span that has none.
        """
        with self._lock:
            return self._table.find_all(addresses, nbytes)

    def items(self) -> list[tuple[int, MemoryRegion, bytes]]:
        """Return the live regions: (key, region, attachment) each."""
        with self._lock:
            items = self._table.items()
            return [(key, region, self._attachments[key]) for key, region in items]

    def attachments(self, keys: list[int]) -> list[bytes]:
        """Return the attachments of live regions; empty for those revoked meanwhile."""
        with self._lock:
            return [self._attachments.get(key, b"") for key in keys]
