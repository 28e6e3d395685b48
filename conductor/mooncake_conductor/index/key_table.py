"""A vectorised hash table from 64-bit keys to small numbers, used by the chunk index.

A bucket is a cache line of eight keys. A lookup of a whole prompt is a few numpy calls, whose cache
misses overlap. A Python dict with millions of keys costs four dependent misses per key, and five
times the memory.

The table grows incrementally, by copying a part with every write: copying ten million keys at once
would block the caller for seconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

KeyArray = NDArray[np.uint64]
Positions = NDArray[np.int64]
Numbers = NDArray[np.int32]

_WIDTH = 8
_MAX_LOAD = 1 / 3
"""Above this load, more than one key in a thousand overflows into the next bucket. At a half it is
one in a hundred, so that every other prompt contains such a key."""
_MIN_BUCKETS = 64
_MOVED_PER_KEY = 4
"""Buckets copied per written key while the table grows."""
_PIECE = 1024
"""Least number of buckets copied at a time, to amortise the cost of numpy calls."""
_SMALL = 4096
"""Number of buckets whose copy takes negligible time."""
# 0-dimensional arrays: numpy is twice as fast with them as with its scalars.
_EMPTY, _REMOVED = np.array(0, np.uint64), np.array(1, np.uint64)
_FIRST_KEY = np.array(2, np.uint64)
# Bijective; the upper bits choose the bucket.
_MIX_XOR, _MIX_TIMES = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
_XOR, _TIMES = np.array(_MIX_XOR, np.uint64), np.array(_MIX_TIMES, np.uint64)
_ALL = (1 << 64) - 1


class _Buckets:
    """One allocation of fixed size.

    Args:
        num_buckets: number of buckets, a power of two.
    """

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self.keys: NDArray[np.uint64] = np.zeros((num_buckets, _WIDTH), np.uint64)
        self.flat = self.keys.reshape(-1)
        self.numbers: Numbers = np.zeros(num_buckets * _WIDTH, np.int32)
        self._by_bucket = self.numbers.reshape(num_buckets, _WIDTH)
        self.shift = np.array(64 - (num_buckets.bit_length() - 1), np.uint64)
        # Occupied entries: keys, and tombstones of removed keys.
        self.num_used = 0

    def find(self, mixed: KeyArray) -> Numbers:
        """The number of each key; 0 if it is not in the table."""
        homes, rows, hits = self._look(mixed)
        if len(hits) == len(mixed):
            return self._by_bucket.take(homes, axis=0).reshape(-1).take(hits)
        at = self._find_overflowed(mixed, homes, rows, hits)
        numbers = self.numbers.take(at)
        numbers[at < 0] = 0
        return numbers

    def locate(self, mixed: KeyArray) -> Positions:
        """The position of each key; -1 if it is not in the table."""
        homes, rows, hits = self._look(mixed)
        if len(hits) == len(mixed):
            places: Positions = hits + (homes - _ramp(len(mixed))) * _WIDTH
            return places
        return self._find_overflowed(mixed, homes, rows, hits)

    def _look(self, mixed: KeyArray) -> tuple[Positions, KeyArray, Positions]:
        """Each key's home bucket, the content of these buckets, and the hits in them, in order."""
        homes = (mixed >> self.shift).view(np.int64)
        rows = self.keys.take(homes, axis=0)
        return homes, rows, (rows == mixed[:, None]).reshape(-1).nonzero()[0]

    def _find_overflowed(
        self, mixed: KeyArray, homes: Positions, rows: KeyArray, hits: Positions
    ) -> Positions:
        """The position of each key, if not all were found in their home buckets."""
        found = np.full(len(mixed), -1, np.int64)
        if len(hits):
            at = hits // _WIDTH
            found[at] = homes[at] * _WIDTH + hits % _WIDTH
        # Buckets are filled in order: one whose last entry is used may have overflowed.
        is_full = rows[:, -1] != _EMPTY
        if not is_full.any():
            return found
        left = np.flatnonzero(is_full & (found < 0))
        step = 1
        while len(left):
            nexts = (homes[left] + step) & (self.num_buckets - 1)
            rows = self.keys.take(nexts, axis=0)
            is_hit = rows == mixed[left, None]
            here = is_hit.any(axis=1)
            found[left[here]] = nexts[here] * _WIDTH + is_hit[here].argmax(axis=1)
            left = left[~here & (rows[:, -1] != _EMPTY)]
            step += 1
        return found

    def insert_new(self, mixed: KeyArray, number: int) -> bool:
        """Insert distinct keys if none of them is in the table. Returns whether it did.

        Reads each key's bucket only once, unless the bucket is full.
        """
        homes, rows, hits = self._look(mixed)
        if len(hits):
            return False
        if rows[:, -1].any():
            is_full = rows[:, -1] != _EMPTY
            crowded = mixed[is_full]
            if (self._find_overflowed(crowded, homes[is_full], rows[is_full], hits) >= 0).any():
                return False
            self.insert(crowded, np.full(len(crowded), number, np.int32))
            mixed, homes, rows = mixed[~is_full], homes[~is_full], rows[~is_full]
        at = homes * _WIDTH + (rows < _FIRST_KEY).argmax(axis=1)
        was_empty = self.flat.take(at) == _EMPTY
        self.flat[at] = mixed
        self.numbers[at] = number
        won = self.flat.take(at) == mixed  # if two keys chose one entry, the later one has it
        self.num_used += int(np.count_nonzero(was_empty & won))
        if not won.all():
            lost = mixed[~won]
            self.insert(lost, np.full(len(lost), number, np.int32))
        return True

    def insert(self, mixed: KeyArray, numbers: Numbers) -> None:
        """Insert distinct keys that are not in the table."""
        homes = (mixed >> self.shift).view(np.int64)
        while True:
            first_free = (self.keys.take(homes, axis=0) < _FIRST_KEY).argmax(axis=1)
            at = homes * _WIDTH + first_free
            before = self.flat.take(at)
            has_room = before < _FIRST_KEY
            if not has_room.all():
                at, before = at[has_room], before[has_room]
            here = mixed[has_room]
            self.flat[at] = here
            won = self.flat.take(at) == here  # if two keys chose one entry, the later one has it
            self.num_used += int(np.count_nonzero((before == _EMPTY) & won))
            if len(here) == len(mixed) and won.all():
                self.numbers[at] = numbers
                return
            self.numbers[at[won]] = numbers[has_room][won]
            lost = np.concatenate((np.flatnonzero(has_room)[~won], np.flatnonzero(~has_room)))
            homes = (homes + ~has_room) & (self.num_buckets - 1)
            mixed, numbers, homes = mixed[lost], numbers[lost], homes[lost]

    def move_from_half(self, old: _Buckets, begin: int, end: int) -> NDArray[np.bool_]:
        """Move keys from some buckets of a table of half the size.

        Each bucket corresponds to two here. A key moves to the same entry of one of the two, if
        both are still empty.

        Returns:
            Which keys were moved, ``[buckets, width]``.
        """
        rows, numbers = old.keys[begin:end], old._by_bucket[begin:end]
        ours = self.keys[2 * begin : 2 * end].reshape(-1, 2, _WIDTH)
        our_numbers = self._by_bucket[2 * begin : 2 * end].reshape(-1, 2, _WIDTH)
        is_taken: NDArray[np.bool_] = np.asarray(ours.any(axis=(1, 2)))
        may_move = (rows >= _FIRST_KEY) & ~is_taken[:, None]
        halves = (rows >> self.shift).view(np.int64) - np.arange(2 * begin, 2 * end, 2)[:, None]
        moved = np.zeros(rows.shape, np.bool_)
        for half in (0, 1):
            chosen = may_move & (halves == half)
            np.copyto(ours[:, half], rows, where=chosen)
            np.copyto(our_numbers[:, half], numbers, where=chosen)
            moved |= chosen
        self.num_used += int(np.count_nonzero(moved))
        return moved


class KeyTable:
    """Positive numbers by key; 0 stands for a missing key."""

    def __init__(self) -> None:
        self._buckets = _Buckets(_MIN_BUCKETS)
        # While the table grows: the old buckets, and the first one that is not copied yet.
        self._old: _Buckets | None = None
        self._next_old = self._owed = 0
        self._next_scan = 0
        self._num_keys = 0

    def __len__(self) -> int:
        return self._num_keys

    def get(self, key: int) -> int:
        """The number of one key; 0 if it is missing."""
        mixed = max(((key ^ _MIX_XOR) * _MIX_TIMES) & _ALL, int(_FIRST_KEY))
        for buckets in (self._buckets, self._old):
            if buckets is None:
                continue
            home = mixed >> int(buckets.shift)
            for step in range(buckets.num_buckets):
                at = (home + step) & (buckets.num_buckets - 1)
                row = buckets.keys[at].tolist()
                if mixed in row:
                    return int(buckets.numbers[at * _WIDTH + row.index(mixed)])
                if 0 in row:
                    break
        return 0

    def find(self, keys: KeyArray) -> Numbers:
        """The number of each key; 0 if it is missing."""
        mixed = _mix(keys)
        numbers = self._buckets.find(mixed)
        if self._old is not None and not numbers.all():
            missing = np.flatnonzero(numbers == 0)
            numbers[missing] = self._old.find(mixed[missing])
        return numbers

    def add_new(self, keys: KeyArray, number: int) -> bool:
        """``add`` if none of these keys is in the table, as for most events.

        Returns:
            False if nothing was added.
        """
        mixed = _mix(keys)
        self._make_room(len(keys))
        if self._old is not None and (self._old.locate(mixed) >= 0).any():
            return False
        if not self._buckets.insert_new(mixed, number):
            return False
        self._num_keys += len(keys)
        return True

    def add(self, keys: KeyArray, number: int) -> None:
        """Add distinct keys that are not in the table, with a positive number."""
        self._make_room(len(keys))
        self._num_keys += len(keys)
        self._buckets.insert(_mix(keys), np.full(len(keys), number, np.int32))

    def change(self, keys: KeyArray, number: int) -> None:
        """Set another positive number for keys that are in the table."""
        mixed = _mix(keys)
        for buckets in (self._buckets, self._old):
            if buckets is not None:
                at = buckets.locate(mixed)
                buckets.numbers[at[at >= 0]] = number

    def remove(self, keys: KeyArray) -> None:
        """Remove distinct keys; missing ones are ignored."""
        mixed = _mix(keys)
        for buckets in (self._buckets, self._old):
            if buckets is not None:
                at = buckets.locate(mixed)
                there = at[at >= 0]
                buckets.flat[there] = _REMOVED
                buckets.numbers[there] = 0
                self._num_keys -= len(there)

    def scan(self, share: float) -> tuple[KeyArray, Numbers]:
        """Keys and numbers of the next part of the table.

        1 / share calls cover the whole table, if it has not grown meanwhile.
        """
        if self._old is not None:
            self._copy(max(int(self._old.num_buckets * share), _SMALL))
        buckets = self._buckets
        count = max(int(buckets.num_buckets * share), 1)
        begin = self._next_scan % buckets.num_buckets
        end = min(begin + count, buckets.num_buckets)
        self._next_scan = end
        flat = buckets.flat[begin * _WIDTH : end * _WIDTH]
        taken = np.flatnonzero(flat >= _FIRST_KEY)
        return _unmix(flat[taken]), buckets.numbers[begin * _WIDTH : end * _WIDTH][taken]

    def _make_room(self, num_keys: int) -> None:
        """Make room for `num_keys` more keys: continue to grow, or start to."""
        if self._old is not None:
            self._owed += num_keys * _MOVED_PER_KEY
            if self._owed >= _PIECE:
                self._copy(self._owed)
                self._owed = 0
        buckets = self._buckets
        if buckets.num_used + num_keys <= buckets.num_buckets * _WIDTH * _MAX_LOAD:
            return
        while self._old is not None:
            self._copy(self._old.num_buckets)
        wanted = _MIN_BUCKETS
        while wanted * _WIDTH * _MAX_LOAD < 1.5 * (self._num_keys + num_keys):
            wanted *= 2
        self._old, self._next_old, self._buckets = self._buckets, 0, _Buckets(wanted)
        self._owed = num_keys * _MOVED_PER_KEY

    def _copy(self, num_buckets: int) -> None:
        old = self._old
        if old is None:
            return
        begin, end = self._next_old, min(self._next_old + num_buckets, old.num_buckets)
        rows, numbers = old.keys[begin:end], old.numbers[begin * _WIDTH : end * _WIDTH]
        left = rows >= _FIRST_KEY
        taken = left.copy()
        if self._buckets.num_buckets == 2 * old.num_buckets:
            left &= ~self._buckets.move_from_half(old, begin, end)
        if left.any():
            self._buckets.insert(rows[left], numbers[left.reshape(-1)])
        np.copyto(rows, _REMOVED, where=taken)
        numbers[:] = 0
        self._next_old = end
        if end == old.num_buckets:
            self._old = None


def _mix(keys: KeyArray) -> KeyArray:
    """Mix keys to spread them evenly. The two values that mark empty entries map to a third one."""
    mixed: KeyArray = np.maximum((keys ^ _XOR) * _TIMES, _FIRST_KEY)
    return mixed


_INVERSE = np.uint64(pow(_MIX_TIMES, -1, 1 << 64))
_RAMP = np.arange(4096)


def _unmix(mixed: KeyArray) -> KeyArray:
    return (mixed * _INVERSE) ^ _XOR


def _ramp(count: int) -> Positions:
    return _RAMP[:count] if count <= len(_RAMP) else np.arange(count)


def as_keys(keys: Sequence[int]) -> KeyArray:
    """Integers from 0 to 2**64 - 1 as an array."""
    # Twenty times as fast as np.array for 64-bit numbers.
    return np.frombuffer(array("Q", keys), np.uint64)
