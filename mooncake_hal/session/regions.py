"""Tables of an endpoint's registered regions, and the lookup of spans in them. Pure."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_hal.errors import OutOfBounds, RegionRevoked, RegionUnknown, TransferError
from mooncake_hal.transport import MemoryRegion, Spans

REMEMBERED_REVOCATIONS = 1024
"""How many of the last revoked ranges are remembered, to distinguish RegionRevoked from
RegionUnknown."""

ADDRESS_LIMIT = 2**64


@dataclass(frozen=True, slots=True, eq=False)
class RegionIndex:
    """An immutable snapshot of regions, sorted by address.

    Args:
        keys, starts, ends: key, first address and end address of each region.
        start_array, end_array: the addresses as uint64 arrays, [regions].
    """

    keys: list[int]
    starts: list[int]
    ends: list[int]
    start_array: NDArray[np.uint64]
    end_array: NDArray[np.uint64]

    @classmethod
    def of(cls, regions: dict[int, MemoryRegion]) -> RegionIndex:
        """Index disjoint regions."""
        order = sorted(regions.items(), key=lambda item: item[1].address)
        starts = [region.address for _, region in order]
        ends = [region.address + region.nbytes for _, region in order]
        # 2**64 does not fit into uint64: a span that ends there is rejected, but no process can map
        # that page.
        limited = [min(end, ADDRESS_LIMIT - 1) for end in ends]
        keys = [key for key, _ in order]
        return cls(keys, starts, ends, np.array(starts, np.uint64), np.array(limited, np.uint64))

    def position(self, address: int, nbytes: int) -> int:
        """Return the position of the region that contains the whole span, or -1."""
        at = bisect_right(self.starts, address) - 1
        return at if at >= 0 and address + nbytes <= self.ends[at] else -1

    def touched(self, positions: NDArray[np.intp]) -> frozenset[int]:
        """Return the keys of the regions at these positions, which may repeat."""
        return frozenset(self.keys[at] for at in np.flatnonzero(np.bincount(positions)).tolist())


class RegionTable:
    """A table of disjoint regions. Changes require the owner's lock; lookups do not.

    Args:
        whose: name of the registering side in messages, such as ``"the peer"``.
    """

    def __init__(self, whose: str) -> None:
        self._whose = whose
        self._revoked: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_REVOCATIONS)
        self._revoked_keys: set[int] = set()
        self._regions: dict[int, MemoryRegion] = {}
        self.index = RegionIndex.of({})

    def add(self, key: int, region: MemoryRegion) -> None:
        """Add a region; raises ValueError, see ``check_can_add``."""
        self.check_can_add(region)
        self._regions[key] = region
        self.index = RegionIndex.of(self._regions)

    def check_can_add(self, region: MemoryRegion) -> None:
        """Check that a region can be added.

        Raises:
            ValueError: it is empty, exceeds the address space, or overlaps another region.
        """
        start, end = region.address, region.address + region.nbytes
        if region.nbytes <= 0 or start < 0 or end > ADDRESS_LIMIT:
            raise ValueError(f"a region must have 1 or more bytes of memory, this is {region}")
        index = self.index
        at = bisect_right(index.starts, start)
        if (at > 0 and index.ends[at - 1] > start) or (
            at < len(index.starts) and index.starts[at] < end
        ):
            raise ValueError(
                f"[{start:#x}, {end:#x}) overlaps a registered region; revoke that one first"
            )

    def revoke(self, key: int) -> MemoryRegion:
        """Remove a region and remember its range as revoked.

        Raises:
            RegionUnknown: no region has that key.
            RegionRevoked: it was revoked before.
        """
        if key in self._revoked_keys:
            raise RegionRevoked(f"region {key} of {self._whose} is revoked already")
        if key not in self._regions:
            raise RegionUnknown(f"{self._whose} registered no region {key}")
        region = self._regions.pop(key)
        self._revoked.append((region.address, region.address + region.nbytes))
        self._revoked_keys.add(key)
        self.index = RegionIndex.of(self._regions)
        return region

    def items(self) -> list[tuple[int, MemoryRegion]]:
        """Return the registered regions with their keys."""
        return list(self._regions.items())

    def revoked_ranges(self) -> list[tuple[int, int]]:
        """Return (start, end) of the most recently revoked regions."""
        return list(self._revoked)

    def find(self, address: int, nbytes: int) -> int:
        """Return the key of the region that contains a span.

        Raises:
            RegionUnknown, RegionRevoked, OutOfBounds: no region contains it.
        """
        index = self.index
        at = index.position(address, nbytes)
        if at < 0:
            raise self._refusal(index, address, nbytes)
        return index.keys[at]

    def find_all(
        self,
        addresses: NDArray[np.uint64],  # [n]
        nbytes: NDArray[np.uint64],  # [n]
    ) -> tuple[RegionIndex, NDArray[np.intp]]:
        """Return an index and, for each span, the position of its region in it: [n].

        Raises:
            RegionUnknown, RegionRevoked, OutOfBounds: for the first span that has none.
        """
        index = self.index
        at = np.searchsorted(index.start_array, addresses, side="right") - 1
        if not index.keys:
            raise self._refusal(index, int(addresses[0]), int(nbytes[0]))
        ends = index.end_array[np.maximum(at, 0)]
        # For an address beyond its region's end the subtraction wraps around, but the comparison
        # before it is true then.
        bad = (at < 0) | (addresses >= ends) | (nbytes > ends - addresses)
        if bad.any():
            first = int(np.argmax(bad))
            raise self._refusal(index, int(addresses[first]), int(nbytes[first]))
        return index, at

    def _refusal(self, index: RegionIndex, address: int, nbytes: int) -> TransferError:
        end = address + nbytes
        at = bisect_right(index.starts, address) - 1
        if at >= 0 and address < index.ends[at]:
            return OutOfBounds(
                f"[{address:#x}, {end:#x}) begins in {self._whose}'s region "
                f"[{index.starts[at]:#x}, {index.ends[at]:#x}) and ends outside it"
            )
        if any(low < end and address < high for low, high in self.revoked_ranges()):
            return RegionRevoked(f"[{address:#x}, {end:#x}) of {self._whose} has been revoked")
        return RegionUnknown(
            f"[{address:#x}, {end:#x}) lies in no region that {self._whose} registered "
            f"({len(index.keys)} registered)"
        )


def check_spans(spans: Spans) -> None:
    """Check that spans are three contiguous uint64 arrays of equal length, without zero lengths.

    Raises:
        ValueError: names the array that is wrong.
    """
    count = len(spans.nbytes)
    for name in ("local", "remote", "nbytes"):
        array = getattr(spans, name)
        if array.dtype != np.uint64 or array.shape != (count,) or not array.flags.c_contiguous:
            raise ValueError(
                f"spans.{name} must be a contiguous uint64 array of shape ({count},), "
                f"it is {array.dtype} of shape {array.shape}"
            )
    if count and not spans.nbytes.all():
        raise ValueError("spans.nbytes holds a zero; leave empty pieces out")


class AttachedRegions:
    """A region table in which every region has an attachment, bytes in the transport's encoding.

    Use ``table`` for lookups only, which need no lock; changes go through this class.

    Args:
        whose: name of the registering side in messages.
    """

    def __init__(self, whose: str) -> None:
        self.table = RegionTable(whose)
        self._attachments: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def check_can_add(self, region: MemoryRegion) -> None:
        """Check that a region can be added; raises ValueError, see ``RegionTable``."""
        with self._lock:
            self.table.check_can_add(region)

    def add(self, key: int, region: MemoryRegion, attachment: bytes) -> None:
        """Add a region.

        Raises:
            ValueError: it is empty or overlaps another one.
        """
        with self._lock:
            self.table.add(key, region)
            self._attachments[key] = attachment

    def revoke(self, key: int) -> None:
        """Remove a region; raises RegionUnknown or RegionRevoked if there is none."""
        with self._lock:
            self.table.revoke(key)
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
        return self.table.find_all(addresses, nbytes)

    def items(self) -> list[tuple[int, MemoryRegion, bytes]]:
        """Return the live regions: (key, region, attachment) each."""
        with self._lock:
            items = self.table.items()
            return [(key, region, self._attachments[key]) for key, region in items]

    def attachments(self, keys: list[int]) -> list[bytes]:
        """Return the attachments of regions; empty bytes for those that have been revoked."""
        with self._lock:
            return [self._attachments.get(key, b"") for key in keys]
