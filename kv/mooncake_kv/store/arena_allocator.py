"""The allocator of an arena: allocates and frees ranges in constant time. Pure: it computes offsets
and has no access to the memory.

Free ranges are kept in bins by size, eight bins per power of two, as in two-level segregated fit
(TLSF). An allocation takes a range from the first bin whose ranges all fit. The allocations after
it are cut from the same range until that is used up, so that a batch of chunks is contiguous. A
freed range is merged with its free neighbours. All chunks of a model have one size, so only several
models in one arena cause fragmentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

GRANULE = 4096
"""Alignment and unit of all allocations in bytes: one page, which direct I/O requires."""

_MANTISSA_BITS = 3
_MANTISSA = 1 << _MANTISSA_BITS
_MAX_TRIES = 16


def rounded_up(nbytes: int) -> int:
    """The size of an allocation of ``nbytes`` bytes."""
    return -(-nbytes // GRANULE) * GRANULE


class ArenaAllocator:
    """Ranges of ``[0, capacity)``, in bytes.

    Args:
        capacity: size in bytes; a partial last granule is not used.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // GRANULE * GRANULE
        self.free_bytes = self.capacity
        self._allocated: dict[int, int] = {}  # offset: length; in granules, like all below
        self._free: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}  # end: offset
        self._bins: dict[int, dict[int, None]] = {}
        self._mask = 0  # bit i: bin i has ranges
        self._open = (0, 0)  # start and end of the range being cut, in no bin
        if self.capacity:
            self._add_free(0, self.capacity // GRANULE)

    def allocate(self, nbytes: int) -> int | None:
        """Allocate a range; returns its offset, or None if no free range is long enough.

        Args:
            nbytes: 1 or more; rounded up to granules.
        """
        return next(iter(self.allocate_many(nbytes, 1)), None)

    def allocate_many(self, nbytes: int, count: int) -> Sequence[int]:
        """Allocate up to ``count`` ranges of one length; returns the offsets of those that fit."""
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
        """Free a range.

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
        """Iterate over adjacent ranges: the free one that ends at ``offset``, if any, the one that
        begins there, and all after it. Nothing may be allocated or freed during the iteration.

        Yields:
            Offset and length in bytes, and whether the range is free.
        """
        self._close_open()
        at = offset // GRANULE
        at = self._free_ends.get(at, at)
        while (length := self._allocated.get(at) or self._free.get(at)) is not None:
            yield at * GRANULE, length * GRANULE, at in self._free
            at += length

    def check_integrity(self) -> None:
        """Check that free and allocated ranges tile the arena, and that free neighbours are merged.

        Raises:
            AssertionError: an invariant is violated.
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
        """Put the rest of the range being cut into its bin. It needs no merge: the range after it
        is not free."""
        start, stop = self._open
        if start < stop:
            self._add_free(start, stop - start)
        self._open = (0, 0)

    def _find(self, length: int) -> int | None:
        fitting = self._mask >> _bin_of(length, up=True) << _bin_of(length, up=True)
        if fitting:
            return next(iter(self._bins[(fitting & -fitting).bit_length() - 1]))
        # ranges in the length's own bin may be shorter or longer than it: try a few
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
    """The bin of a length: its floating-point form with three bits of mantissa.

    Args:
        length: length in granules.
        up: if True, the first bin whose ranges are all at least this long; if False, the bin that
            contains this length.
    """
    if length < _MANTISSA:
        return length
    exponent = length.bit_length() - 1 - _MANTISSA_BITS
    mantissa = length >> exponent
    if up and mantissa << exponent != length:
        mantissa += 1
    return (exponent << _MANTISSA_BITS) + mantissa
