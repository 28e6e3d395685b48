"""The NICs' keys of registered regions, as arrays to look a whole batch up in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.transports.rdma.facts import RegionKeys


@dataclass(frozen=True, slots=True, eq=False)
class KeyTable:
    """How every rail addresses every region, at one moment.

    Args:
        regions: [regions] the endpoint's keys of the regions, by address.
        keys: [rails, regions] the NIC's key.
        shifts: [rails, regions] what to add to an address, modulo 2**64.
        on_host: [regions] whether the CPU can read it, which inline sends need.
    """

    regions: list[int]
    keys: NDArray[np.uint32]
    shifts: NDArray[np.uint64]
    on_host: NDArray[np.bool_]

    def touched(self, positions: NDArray[np.intp]) -> set[int]:
        """Return the regions that lie at ``positions``."""
        return {self.regions[at] for at in np.unique(positions).tolist()}


class KeyTables:
    """Builds key tables, and keeps the last: regions change rarely, transfers are many.

    Args:
        rails: how many rails the endpoint has.
        lookup: returns the keys of regions; None for one that was revoked meanwhile.
    """

    def __init__(
        self, rails: int, lookup: Callable[[list[int]], Sequence[RegionKeys | None]]
    ) -> None:
        self._rails = rails
        self._lookup = lookup
        self._last: KeyTable | None = None

    def of(self, regions: list[int]) -> KeyTable:
        """Return the table of ``regions``, a list that is never changed in place."""
        last = self._last
        if last is None or last.regions is not regions:
            last = self._last = self._build(regions)
        return last

    def _build(self, regions: list[int]) -> KeyTable:
        keys = np.zeros((self._rails, len(regions)), np.uint32)
        shifts = np.zeros((self._rails, len(regions)), np.uint64)
        on_host = np.zeros(len(regions), np.bool_)
        for at, found in enumerate(self._lookup(regions)):
            if found is not None:  # else key 0, which every NIC refuses
                keys[:, at] = found.keys
                shifts[:, at] = found.shifts
                on_host[at] = found.on_host
        return KeyTable(regions, keys, shifts, on_host)
