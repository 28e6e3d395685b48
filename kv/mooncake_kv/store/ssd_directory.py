"""One directory of segments on an SSD: appended to, read, scanned at start, recycled whole.

Nothing is synced: it is a cache. After a crash the scan finds what reached the disk, and a record
whose bytes did not is noticed when it is read. Segments that were written once are written again
rather than replaced: new extents cost the file system twice the time.

A drive may hang in whatever it is asked to do. So its lock guards numbers and lists only, and no
file is touched under it: who reads does not wait for who writes or begins a segment.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

from mooncake_kv.errors import KVConfigError, StoreIOError
from mooncake_kv.store.chunk_keys import KEY_VERSION
from mooncake_kv.store.ssd_records import (
    PAGE,
    RECORD_VERSION,
    RecordHeader,
    SegmentHeader,
    fill_page,
    read_page,
    record_bytes,
)
from mooncake_kv.store.ssd_sections import read_sections

logger = logging.getLogger(__name__)

LOCK_NAME = "mooncake-kv.lock"
_SEGMENT_NAME = re.compile(r"segment-(\d{8})\.kv")

MIN_SEGMENTS = 3
"""One to write to, one to collect from, and one that holds something meanwhile."""
GROW_AGAIN_S = 300.0
"""After how long a file system that refused a segment is asked for one again."""
BEGIN_WAIT_S = 10.0
"""How long a record waits for a segment that another thread begins, unless said otherwise."""


@dataclass(frozen=True, slots=True)
class SsdDirectoryConfig:
    """A directory that a store may use, alone.

    Args:
        path: existing and writable.
        capacity_bytes: of all its segments together.
        segment_bytes: of one.
        min_free_bytes: what the file system keeps for others: no segment is added that would leave
            less.
    """

    path: Path
    capacity_bytes: int
    segment_bytes: int = 256 << 20
    min_free_bytes: int = 2 << 30


@dataclass(slots=True, eq=False)
class Segment:
    """A file of records.

    Args:
        number: in its name.
        file: its descriptor.
        use: what records of now carry; empty if it holds none.
        sequence: how many segments had been begun before this use of it.
        end: where the next record goes.
        num_busy: records that are being written or read.
    """

    number: int
    file: int
    use: bytes = b""
    sequence: int = -1
    end: int = PAGE
    num_busy: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RecordLocation:
    """Where a record lies; of a use of its segment that may be over."""

    segment: Segment
    use: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """A record that was found at start."""

    header: RecordHeader
    location: RecordLocation


class SsdDirectory:
    """Segments in one directory. Any thread, once it is open.

    Args:
        config: see there.
        clock: seconds.

    Raises:
        KVConfigError: its capacity makes too few segments.
    """

    def __init__(
        self, config: SsdDirectoryConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._clock = clock
        self._max_segments = config.capacity_bytes // config.segment_bytes
        if self._max_segments < MIN_SEGMENTS or config.segment_bytes % PAGE:
            raise KVConfigError(
                f"{config.path}: {config.capacity_bytes} bytes make {self._max_segments} segments "
                f"of {config.segment_bytes}; wanted are {MIN_SEGMENTS} or more, of whole pages of "
                f"{PAGE}"
            )
        self._lock = threading.Lock()
        self._begun = threading.Condition(self._lock)
        self._is_beginning = False  # by one thread at a time
        self._refused_until: float | None = None  # what the file system did not give last time
        self._lock_file = -1
        self._is_direct = True
        self._current: Segment | None = None
        self._sealed: dict[int, Segment] = {}  # by sequence, the oldest first
        self._free: list[Segment] = []
        self._last_sequence = -1
        self._last_number = -1
        self.num_unreadable = 0
        """Segments whose headers could not be read at start: they are left alone."""

    def open(self) -> None:
        """Lock the directory and open its segments. Once, before all else; ``close`` must follow.

        Raises:
            KVConfigError: it can't be used, or another store uses it.
        """
        self._lock_file = _lock_directory(self.config.path)
        try:
            self._open_segments()
        except OSError as exc:
            self.close()
            raise KVConfigError(f"{self.config.path} can't be used for a store: {exc}") from exc

    @property
    def max_chunk_bytes(self) -> int:
        """The longest chunk that fits."""
        return self.config.segment_bytes - 2 * PAGE

    def scan(self) -> Iterator[ScannedRecord]:
        """All records that were written completely, as far as their headers tell; the oldest first.
        Before anything is appended.

        The bytes of the last one of each segment are the reader's to check, as all others'.
        """
        page = aligned_buffer(PAGE)
        for sequence in sorted(self._sealed):
            segment = self._sealed[sequence]
            try:
                for header, offset in _records_in(segment, self.config.segment_bytes, page):
                    segment.end = offset + record_bytes(header.nbytes)
                    yield ScannedRecord(header, RecordLocation(segment, segment.use, offset))
            except OSError as exc:
                logger.warning("%s: the rest of a segment is lost: %s", self.config.path, exc)

    def append(self, nbytes: int, wait_s: float = BEGIN_WAIT_S) -> RecordLocation | None:
        """Take room for a chunk's record; ``write``, if at all, and ``give_up`` must follow.

        Args:
            nbytes: of the chunk.
            wait_s: how long to wait for a segment that another thread begins.

        Returns:
            None if there is none: the disk is full, all segments are in use, or the next one was
            not begun in time.

        Raises:
            StoreIOError: the system refuses a new segment.
        """
        needed = record_bytes(nbytes)
        with self._begun:
            if not self._begun.wait_for(lambda: not self._is_beginning, wait_s):
                return None
            if (location := self._take(needed)) is not None:
                return location
            self._seal()
            free = self._free.pop(0) if self._free else None
            self._is_beginning = True
        begun = None
        try:
            begun = self._begin_segment(free)
        finally:
            with self._begun:
                self._is_beginning, self._current = False, begun
                location = self._take(needed)
                self._begun.notify_all()
        return location

    def write(self, location: RecordLocation, page: memoryview, payload: memoryview) -> None:
        """Write a record where ``append`` said.

        Raises:
            StoreIOError: it was not written, and the segment takes no more.
        """
        total = len(page) + len(payload)
        segment = location.segment
        try:
            written = os.pwritev(segment.file, [page, payload], location.offset)
            if written != total:
                raise OSError(f"{written} of {total} bytes were written")
        except OSError as exc:
            self.leave_hole(location)
            raise StoreIOError(f"{self.config.path}: writing failed: {exc}") from exc

    def leave_hole(self, location: RecordLocation) -> None:
        """Nothing is written where ``append`` said. The segment takes no more: a scan would end
        there."""
        with self._lock:
            if self._current is location.segment:
                self._seal()

    def hold(self, location: RecordLocation) -> bool:
        """Keep a segment from being recycled; False if it was already. ``give_up`` must follow."""
        with self._lock:
            if location.segment.use != location.use:
                return False
            location.segment.num_busy += 1
            return True

    def give_up(self, location: RecordLocation) -> None:
        """End what ``append`` or ``hold`` began."""
        with self._lock:
            location.segment.num_busy -= 1

    def read(self, location: RecordLocation, start: int, buffers: Sequence[memoryview]) -> None:
        """Read from a record that is held.

        Args:
            location: of the record.
            start: how many of its bytes are passed over, its page included; whole pages.
            buffers: to be filled one after the other.

        Raises:
            StoreIOError: not all of that can be read.
        """
        total = sum(map(len, buffers))
        try:
            found = os.preadv(location.segment.file, buffers, location.offset + start)
        except OSError as exc:
            raise StoreIOError(f"{self.config.path}: reading failed: {exc}") from exc
        if found != total:
            raise StoreIOError(f"{self.config.path}: {found} of {total} bytes are there to be read")

    def read_sections(
        self, location: RecordLocation, start: int, payload: memoryview, section: int
    ) -> bytes:
        """Read whole sections of a record that is held; returns their checksums, see
        ``section_checksums``.

        Args:
            location, start: see ``read``.
            payload: to be filled.
            section: bytes of each.

        Raises:
            StoreIOError: not all of that can be read.
        """
        try:
            return read_sections(location.segment.file, location.offset + start, payload, section)
        except OSError as exc:
            raise StoreIOError(f"{self.config.path}: reading failed: {exc}") from exc

    def wants_collection(self, wait_s: float = 0.0) -> Segment | None:
        """The oldest segment, if the next one to begin would have to be it; None while there is
        room for others.

        Args:
            wait_s: how long to wait for a segment that another thread begins: there may be none for
                it either.

        Raises:
            StoreIOError: the file system does not say whether there is.
        """
        with self._begun:
            if not self._begun.wait_for(lambda: not self._is_beginning, wait_s):
                return None
            if self._free or not self._sealed:
                return None
        if self._can_grow():
            return None
        with self._lock:
            return next(iter(self._sealed.values()), None)

    def recycle(self, segment: Segment) -> bool:
        """Make a sealed segment free; its records are nobody's. False if one is being read."""
        with self._lock:
            if segment.num_busy or self._sealed.get(segment.sequence) is not segment:
                return False
            del self._sealed[segment.sequence]
            segment.use = b""
            self._free.append(segment)
            return True

    def close(self) -> None:
        """Close all files, and let others have the directory. Idempotent."""
        with self._lock:
            segments = [*self._sealed.values(), *self._free]
            if self._current is not None:
                segments.append(self._current)
            self._sealed, self._free, self._current = {}, [], None
            for segment in segments:
                os.close(segment.file)
            if self._lock_file >= 0:
                os.close(self._lock_file)
                self._lock_file = -1

    # -- at start -------------------------------------------------------------------------------

    def _open_segments(self) -> None:
        page = aligned_buffer(PAGE)
        found, num_old = self._open_files(), 0
        for segment in list(found):
            try:
                is_whole = os.preadv(segment.file, [page], 0) == PAGE
            except OSError as exc:  # its drive has bad blocks: it is not written to either
                logger.warning("%s is left alone: %s", self._path_of(segment.number), exc)
                self.num_unreadable += 1
                found.remove(segment)
                os.close(segment.file)
                continue
            header = read_page(page) if is_whole else None
            if _is_current(header) and header.sequence not in self._sealed:
                segment.use, segment.sequence = header.use, header.sequence
                self._last_sequence = max(self._last_sequence, header.sequence)
                self._sealed[header.sequence] = segment
            else:
                self._free.append(segment)
                num_old += isinstance(header, SegmentHeader) and not _is_current(header)
        if num_old:
            logger.warning(
                "%s: what another release wrote can't be read, and is dropped: %d segments",
                self.config.path,
                num_old,
            )
        self._sealed = dict(sorted(self._sealed.items()))
        while len(found) > self._max_segments and self._free:  # the capacity is smaller now
            self._remove(self._free.pop())
            found.pop()
        while len(self._sealed) > self._max_segments:
            self._remove(self._sealed.pop(next(iter(self._sealed))))

    def _open_files(self) -> list[Segment]:
        """The files of segments that are there. One that is longer than a segment may be now would
        take more of the capacity than it counts for."""
        found, num_longer = [], 0
        for path in sorted(self.config.path.iterdir()):
            if match := _SEGMENT_NAME.fullmatch(path.name):
                segment = Segment(int(match[1]), self._open_file(path))
                self._last_number = max(self._last_number, segment.number)
                if os.fstat(segment.file).st_size > self.config.segment_bytes:
                    self._remove(segment)
                    num_longer += 1
                else:
                    found.append(segment)
        if num_longer:
            logger.warning(
                "%s: segments that are longer than they are to be now are dropped: %d",
                self.config.path,
                num_longer,
            )
        return found

    def _remove(self, segment: Segment) -> None:
        os.close(segment.file)
        self._path_of(segment.number).unlink()

    def _path_of(self, number: int) -> Path:
        return self.config.path / f"segment-{number:08}.kv"

    def _open_file(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        if self._is_direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as exc:  # EINVAL, on tmpfs and some network file systems
                if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._is_direct = False
                logger.warning(
                    "%s: the file system has no direct I/O; the page cache is used", path.parent
                )
        return os.open(path, flags, 0o600)

    # -- inside, the lock held ------------------------------------------------------------------

    def _take(self, needed: int) -> RecordLocation | None:
        """Room in the segment of now, if it has as much."""
        segment = self._current
        if segment is None or segment.end + needed > self.config.segment_bytes:
            return None
        location = RecordLocation(segment, segment.use, segment.end)
        segment.end += needed
        segment.num_busy += 1
        return location

    def _seal(self) -> None:
        if self._current is not None:
            self._sealed[self._current.sequence] = self._current
            self._current = None

    def _num_segments(self) -> int:
        return len(self._sealed) + len(self._free) + (self._current is not None)

    # -- inside, without the lock -----------------------------------------------------------------

    def _can_grow(self) -> bool:
        """Whether a segment may be added. What the file system refused is not asked for again for a
        while: with quotas it has more free bytes than it gives."""
        with self._lock:
            count, refused_until = self._num_segments(), self._refused_until
        if count >= self._max_segments:
            return False
        if count and refused_until is not None and self._clock() < refused_until:
            return False
        try:
            disk = os.statvfs(self.config.path)
        except OSError as exc:
            raise StoreIOError(f"{self.config.path} can't be asked for room: {exc}") from exc
        left = disk.f_bavail * disk.f_frsize - self.config.segment_bytes
        return left >= self.config.min_free_bytes

    def _begin_segment(self, free: Segment | None) -> Segment | None:
        """Begin a use of a free segment, or of a new one if there may be one more."""
        segment = free or (self._new_segment() if self._can_grow() else None)
        if segment is None:
            return None
        segment.use = secrets.token_bytes(8)
        self._last_sequence += 1
        segment.sequence, segment.end = self._last_sequence, PAGE
        page = aligned_buffer(PAGE)
        header = SegmentHeader(segment.use, segment.sequence, records=RECORD_VERSION)
        fill_page(page, header)
        try:
            os.pwritev(segment.file, [page], 0)
        except OSError as exc:
            segment.use = b""
            with self._lock:
                self._free.append(segment)
            raise StoreIOError(f"{self.config.path}: a segment can't be begun: {exc}") from exc
        return segment

    def _new_segment(self) -> Segment:
        path = self._path_of(self._last_number + 1)
        try:
            file = self._open_file(path)
            try:
                os.posix_fallocate(file, 0, self.config.segment_bytes)
            except OSError:
                os.close(file)
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                raise
        except OSError as exc:
            if self._refused_until is None:
                logger.warning(
                    "%s: no segment can be added, the oldest ones are written again instead: %s",
                    self.config.path,
                    exc,
                )
            self._refused_until = self._clock() + GROW_AGAIN_S
            raise StoreIOError(f"{path} can't be made: {exc}") from exc
        self._refused_until = None
        self._last_number += 1
        return Segment(self._last_number, file)


def _is_current(header: object) -> TypeGuard[SegmentHeader]:
    """Whether it is a segment's header, and what lies behind it is of this release's layout."""
    return isinstance(header, SegmentHeader) and (
        (header.version, header.records) == (KEY_VERSION, RECORD_VERSION)
    )


def aligned_buffer(nbytes: int) -> memoryview:
    """Memory that direct I/O takes."""
    return memoryview(mmap.mmap(-1, nbytes))


def _records_in(
    segment: Segment, segment_bytes: int, page: memoryview
) -> Iterator[tuple[RecordHeader, int]]:
    """The records of a segment's present use, with their offsets, up to the first that is none."""
    offset = PAGE
    size = min(segment_bytes, os.fstat(segment.file).st_size)
    while offset + PAGE <= size and os.preadv(segment.file, [page], offset) == PAGE:
        header = read_page(page)
        if not isinstance(header, RecordHeader) or header.use != segment.use:
            return
        end = offset + record_bytes(header.nbytes)
        if end > size:
            return
        if header.key:
            yield header, offset
        offset = end


def _lock_directory(path: Path) -> int:
    try:
        file = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as exc:
        # Made here, it would hide that a drive is not mounted, and fill the one below.
        raise KVConfigError(
            f"{path} can't be used for a store: there is no such directory; mount its drive, or "
            "make it"
        ) from exc
    except OSError as exc:
        raise KVConfigError(f"{path} can't be used for a store: {exc}") from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(file)
        raise KVConfigError(
            f"{path} is in use by another store; give each a directory of its own"
        ) from exc
    return file


@dataclass(slots=True)
class SsdBudget:
    """How many bytes may be written: a bucket that fills evenly over the day. Pure.

    Args:
        bytes_per_day: the rate; 0 is no limit.
        full_s: how many seconds' worth it holds: how long a burst may be.
    """

    bytes_per_day: int
    full_s: float = 3600.0
    _left: float = field(init=False, default=0.0)
    _filled_at: float | None = field(init=False, default=None)

    def take(self, nbytes: int, now: float) -> bool:
        """Spend that many bytes, if they are there."""
        if not self.bytes_per_day:
            return True
        rate = self.bytes_per_day / 86_400
        most = max(rate * self.full_s, nbytes)
        if self._filled_at is None:
            self._left = most
        else:
            self._left = min(most, self._left + rate * (now - self._filled_at))
        self._filled_at = now
        if self._left < nbytes:
            return False
        self._left -= nbytes
        return True
