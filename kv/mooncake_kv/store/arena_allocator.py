"""Which bytes of an arena are free: an allocator of ranges in constant time. Pure: no memory here.

Free ranges are kept in bins by size, eight bins to a power of two, as in two-level segregated fit.
An allocation takes a range from the first bin whose ranges all fit, and those that follow it cut
from the same one as long as it lasts: a batch of chunks is cut at once, and lies in one piece. A
range that is freed joins its neighbours. Chunks of one model have one size, so that there is no
fragmentation but between models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

GRANULE = 4096
"""Allocations begin at multiples of it and are multiples of it long: a page, and what direct I/O
wants."""

_MANTISSA_BITS = 3
_MANTISSA = 1 << _MANTISSA_BITS
_MAX_TRIES = 16


def rounded_up(nbytes: int) -> int:
    """What an allocation of that many bytes takes."""
    return -(-nbytes // GRANULE) * GRANULE


class ArenaAllocator:
    """Ranges of ``[0, capacity)``, in bytes.

    Args:
        capacity: bytes; what is beyond the last whole granule is not used.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self.free_bytes = self.capacity
        self._allocated: dict[int, int] = {}  # offset: length; in granules, as all below
        self._free: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}  # end: offset
        self._bins: dict[int, dict[int, None]] = {}
        self._mask = 0  # bit i: bin i has ranges
        self._open = (0, 0)  # the range that is cut from, in no bin; ends at the second number
        if self.capacity:
            self._add_free(0, self.capacity // GRANULE)

    def allocate(self, nbytes: int) -> int | None:
        """Take a range; returns its offset, or None if no free range is long enough.

        Args:
            nbytes: 1 or more; rounded up to granules.
        """
        return next(iter(self.allocate_many(nbytes, 1)), None)

    def allocate_many(self, nbytes: int, count: int) -> Sequence[int]:
        """Take ranges of one length; returns their offsets, of as many as there is room for."""
        length = max(1, -(-nbytes // GRANULE))
        taken: list[int] = []
        while len(taken) < count:
            offset, stop = self._open
            if stop - offset < length:
                self._close_open()
                found = self._find(length)
                if found is None:
                    break
                offset, stop = found, found + self._take_free(found)
            fitting = min(count - len(taken), (stop - offset) // length)
            end = offset + fitting * length
            self._open = (end, stop)
            starts = range(offset, end, length)
            self._allocated.update(dict.fromkeys(starts, length))
            taken += starts
        self.free_bytes -= len(taken) * length * GRANULE
        return [start * GRANULE for start in taken]

    def free(self, offset: int) -> None:
        """Give a range back.

        Raises:
            KeyError: no range begins there.
        """
        start = offset // GRANULE
        length = self._allocated.pop(start)
        self._close_open()
        self.free_bytes += length * GRANULE
        if (before := self._free_ends.get(start)) is not None:
            length += self._take_free(before)
            start = before
        if start + length in self._free:
            length += self._take_free(start + length)
        self._add_free(start, length)

    def allocated_bytes(self, offset: int) -> int:
        """Length of the range that begins at ``offset``, in bytes.

        Raises:
            KeyError: no range begins there.
        """
        return self._allocated[offset // GRANULE] * GRANULE

    def ranges_from(self, offset: int) -> Iterator[tuple[int, int, bool]]:
        """Ranges side by side: the free one before ``offset``, if there is one, that which begins
        there, and those behind it. Offset, length in bytes, whether it is free. Nothing may be
        allocated or freed meanwhile."""
        self._close_open()
        at = offset // GRANULE
        at = self._free_ends.get(at, at)
        while (length := self._allocated.get(at) or self._free.get(at)) is not None:
            yield at * GRANULE, length * GRANULE, at in self._free
            at += length

    def check_integrity(self) -> None:
        """Prove that free and allocated ranges tile the arena, and that neighbours are joined.

        Raises:
            AssertionError: they don't.
        """
        self._close_open()
        ranges = sorted([*self._allocated.items(), *self._free.items()])
        at, was_free = 0, False
        for offset, length in ranges:
            assert offset == at, f"granules {at} to {offset} are lost, or owned twice"
            is_free = offset in self._free
            assert not (is_free and was_free), f"two free ranges meet at granule {offset}"
            at, was_free = offset + length, is_free
        assert at * GRANULE == self.capacity, "the arena's end is lost"
        assert self.free_bytes == sum(self._free.values()) * GRANULE, "free bytes don't conserve"
        assert {end - self._free[start] for end, start in self._free_ends.items()} == set(
            self._free
        ), "an end of a free range is wrong"
        binned = {offset for ranges_of in self._bins.values() for offset in ranges_of}
        assert binned == set(self._free), "a free range is in no bin"

    def _close_open(self) -> None:
        """Put the range that was cut from into its bin; what is behind it is not free."""
        start, stop = self._open
        if start < stop:
            self._add_free(start, stop - start)
        self._open = (0, 0)

    def _find(self, length: int) -> int | None:
        fitting = self._mask >> _bin_of(length, up=True) << _bin_of(length, up=True)
        if fitting:
            return next(iter(self._bins[(fitting & -fitting).bit_length() - 1]))
        # ranges of the bin that the length itself is in may be shorter or longer than it
        own = self._bins.get(_bin_of(length, up=False), {})
        for _, offset in zip(range(_MAX_TRIES), own, strict=False):
            if self._free[offset] >= length:
                return offset
        return None

    def _add_free(self, offset: int, length: int) -> None:
        number = _bin_of(length, up=False)
        self._free[offset] = length
        self._free_ends[offset + length] = offset
        self._bins.setdefault(number, {})[offset] = None
        self._mask |= 1 << number

    def _take_free(self, offset: int) -> int:
        length = self._free.pop(offset)
        del self._free_ends[offset + length]
        number = _bin_of(length, up=False)
        ranges = self._bins[number]
        del ranges[offset]
        if not ranges:
            self._mask &= ~(1 << number)
        return length


def _bin_of(length: int, *, up: bool) -> int:
    """The bin of a length: a floating-point number with three bits of mantissa.

    Args:
        length: granules.
        up: the first bin all of whose ranges are at least as long, rather than the one it is in.
    """
    if length < _MANTISSA:
        return length
    exponent = length.bit_length() - 1 - _MANTISSA_BITS
    mantissa = length >> exponent
    if up and mantissa << exponent != length:
        mantissa += 1
    return (exponent << _MANTISSA_BITS) + mantissa
