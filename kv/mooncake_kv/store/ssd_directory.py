"""One directory of segment files on an SSD: records are appended, read and scanned at start, and
segments are recycled whole. Used by ``Drive`` and ``SsdTier``.

Nothing is synced to disk, since this is a cache. After a crash, the scan finds the headers that
reached the disk, and a record whose bytes did not is detected by its checksums when it is read.
Recycled segments are overwritten in place: a new file needs new extents, which take the file system
twice the time.

Any request to a drive may hang. So the lock guards in-memory state only, and no file is accessed
while it is held: reads don't block on a write or on the start of a new segment.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from mooncake_kv.errors import KVConfigError, StoreIOError
from mooncake_kv.store.chunk_keys import KEY_VERSION
from mooncake_kv.store.ssd_config import SsdDirectoryConfig
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
"""One segment to write to, one to collect, and one that keeps its chunks in the meantime."""
GROW_RETRY_S = 300.0
"""Seconds before the next attempt to add a segment after the file system refused one."""
BEGIN_WAIT_S = 10.0
"""Default of the seconds that ``append`` waits for a segment that another thread is starting."""


@dataclass(slots=True, eq=False)
class Segment:
    """A file of records. Recycling it starts a new *use*, identified by a random id.

    Args:
        number: the number in its file name.
        file: its file descriptor.
        use: id of its current use, which its records carry; empty while it holds none.
        sequence: number of segment uses that were started before this one in the directory.
        end: offset of the next record.
        num_busy: records in it that are being written or read.
    """

    number: int
    file: int
    use: bytes = b""
    sequence: int = -1
    end: int = PAGE
    num_busy: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RecordLocation:
    """Where a record is. Stale once ``segment.use`` differs from ``use``."""

    segment: Segment
    use: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """A record that the scan at start has found."""

    header: RecordHeader
    location: RecordLocation


class SsdDirectory:
    """The segments of one directory. Thread-safe once it is open.

    Args:
        config: path, capacity and segment size.
        clock: monotonic seconds.

    Raises:
        KVConfigError: the capacity is below MIN_SEGMENTS segments, or segments are not whole pages.
    """

    def __init__(
        self, config: SsdDirectoryConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self._clock = clock
        self._max_segments = config.capacity_bytes // max(config.segment_bytes, PAGE)
        is_whole = config.segment_bytes >= PAGE and config.segment_bytes % PAGE == 0
        if self._max_segments < MIN_SEGMENTS or not is_whole:
            raise KVConfigError(
                f"{config.path}: {config.capacity_bytes} bytes are {self._max_segments} segments "
                f"of {config.segment_bytes}; a directory needs {MIN_SEGMENTS} or more, each a "
                f"multiple of {PAGE} bytes; give it more bytes, or `mooncake-kv store` a smaller "
                "--ssd-segment-bytes"
            )
        self._lock = threading.Lock()
        self._begun = threading.Condition(self._lock)
        self._is_beginning = False  # a thread is starting a segment; only one at a time does
        self._refused_until: float | None = None  # when to ask the file system for space again
        self._lock_file = -1
        self._is_direct = True
        self._current: Segment | None = None
        self._sealed: dict[int, Segment] = {}  # by sequence, oldest first
        self._free: list[Segment] = []
        self._last_sequence = -1
        self._last_number = -1
        self.num_unreadable = 0
        """Segments whose headers could not be read at start; they are not used."""

    def open(self) -> None:
        """Lock the directory and open its segments. Must be called once, before any other method;
        ``close`` must follow.

        Raises:
            KVConfigError: the directory can't be used, or another store uses it.
        """
        self._lock_file = _lock_directory(self.config.path)
        try:
            self._open_segments()
            has_room = self._num_segments() > 0 or self._can_grow()
        except (OSError, StoreIOError) as exc:
            self.close()
            raise _unusable(self.config.path, exc) from exc
        if not has_room:
            logger.warning(
                "%s: nothing is stored there until its file system has more free space, a segment "
                "of %d bytes and %d bytes beside it: free some, or lower --ssd-min-free-bytes",
                self.config.path,
                self.config.segment_bytes,
                self.config.min_free_bytes,
            )

    @property
    def max_chunk_bytes(self) -> int:
        """Size of the largest chunk that fits into a segment."""
        return self.config.segment_bytes - 2 * PAGE

    def scan(self) -> Iterator[ScannedRecord]:
        """Yield all records with an intact header, oldest first. Must complete before anything is
        appended.

        The payload is not read: a record may be damaged, which its reader detects.
        """
        page = aligned_buffer(PAGE)
        for sequence in sorted(self._sealed):
            segment = self._sealed[sequence]
            try:
                for header, offset in _records_in(segment, self.config.segment_bytes, page):
                    segment.end = offset + record_bytes(header.nbytes)
                    yield ScannedRecord(header, RecordLocation(segment, segment.use, offset))
            except OSError as exc:
                logger.warning(
                    "%s: the rest of segment %d can't be scanned: %s",
                    self.config.path,
                    segment.number,
                    exc,
                )

    def append(self, nbytes: int, wait_s: float = BEGIN_WAIT_S) -> RecordLocation | None:
        """Allocate space for a chunk's record. ``write`` may follow, and ``release`` must.

        Args:
            nbytes: size of the chunk.
            wait_s: seconds to wait for a segment that another thread is starting.

        Returns:
            None if no space is available: the disk is full, all segments are in use, or the next
            segment was not started in time.

        Raises:
            StoreIOError: a new segment can't be created or started.
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
        """Write a record to the space that ``append`` has allocated.

        Raises:
            StoreIOError: the write failed; the segment is sealed.
        """
        total = len(page) + len(payload)
        segment = location.segment
        try:
            written = os.pwritev(segment.file, [page, payload], location.offset)
            if written != total:
                raise OSError(f"{written} of {total} bytes were written")
        except OSError as exc:
            self.leave_hole(location)
            raise StoreIOError(f"{self.config.path}: a write failed: {exc}") from exc

    def leave_hole(self, location: RecordLocation) -> None:
        """Leave allocated space unwritten, and seal the segment: a scan ends at the hole, so that
        records after it would be lost."""
        with self._lock:
            if self._current is location.segment:
                self._seal()

    def hold(self, location: RecordLocation) -> bool:
        """Keep a record's segment from being recycled; False if it has been already. If True,
        ``release`` must follow."""
        with self._lock:
            if location.segment.use != location.use:
                return False
            location.segment.num_busy += 1
            return True

    def release(self, location: RecordLocation) -> None:
        """Release the segment that ``append`` or ``hold`` has kept from being recycled."""
        with self._lock:
            location.segment.num_busy -= 1

    def read(self, location: RecordLocation, start: int, buffers: Sequence[memoryview]) -> None:
        """Read from a record that is held.

        Args:
            location: where the record is.
            start: offset in the record, counted from its header page; whole pages.
            buffers: filled one after the other.

        Raises:
            StoreIOError: the read failed or was short.
        """
        total = sum(map(len, buffers))
        try:
            found = os.preadv(location.segment.file, buffers, location.offset + start)
        except OSError as exc:
            raise StoreIOError(f"{self.config.path}: a read failed: {exc}") from exc
        if found != total:
            raise StoreIOError(f"{self.config.path}: a read was short: {found} of {total} bytes")

    def read_sections(
        self, location: RecordLocation, start: int, payload: memoryview, section: int
    ) -> bytes:
        """Read whole sections of a record that is held; returns their checksums, see
        ``section_checksums``.

        Args:
            location, start: see ``read``.
            payload: the buffer to fill.
            section: bytes per section.

        Raises:
            StoreIOError: the read failed or was short.
        """
        try:
            return read_sections(location.segment.file, location.offset + start, payload, section)
        except OSError as exc:
            raise StoreIOError(f"{self.config.path}: a read failed: {exc}") from exc

    def segment_to_collect(self, wait_s: float = 0.0) -> Segment | None:
        """The segment to collect: the oldest one. None while a free segment exists or another one
        may be added.

        Args:
            wait_s: seconds to wait for a segment that another thread is starting, which may use up
                the last free one.

        Raises:
            StoreIOError: the file system's free space can't be determined.
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
        """Make a sealed segment free and its records invalid. False if one is in use."""
        with self._lock:
            if segment.num_busy or self._sealed.get(segment.sequence) is not segment:
                return False
            del self._sealed[segment.sequence]
            segment.use = b""
            self._free.append(segment)
            return True

    def close(self) -> None:
        """Close all files and unlock the directory. Idempotent."""
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
            except OSError as exc:  # bad blocks: the segment is not written to either
                logger.warning("%s is not used: %s", self._path_of(segment.number), exc)
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
                "%s: dropped %d segments that another release wrote and this one can't read",
                self.config.path,
                num_old,
            )
        self._sealed = dict(sorted(self._sealed.items()))
        while len(found) > self._max_segments and self._free:  # the capacity was reduced
            self._remove(self._free.pop())
            found.pop()
        while len(self._sealed) > self._max_segments:
            self._remove(self._sealed.pop(next(iter(self._sealed))))

    def _open_files(self) -> list[Segment]:
        """Open the existing segment files. A file longer than the configured segment size is
        removed, since it would take more space than it counts for."""
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
                "%s: dropped %d segments that are longer than the configured segment size",
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
            except OSError as exc:  # EINVAL on tmpfs and some network file systems
                if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._is_direct = False
                logger.warning(
                    "%s: the file system has no direct I/O, using the page cache", path.parent
                )
        return os.open(path, flags, 0o600)

    # -- inside, with the lock held -------------------------------------------------------------

    def _take(self, needed: int) -> RecordLocation | None:
        """Allocate space in the current segment; None if it has too little."""
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
        """Whether a segment may be added. After the file system refused one, False for GROW_RETRY_S
        whatever free space it reports: with quotas it reports more than it grants."""
        with self._lock:
            count, refused_until = self._num_segments(), self._refused_until
        if count >= self._max_segments:
            return False
        if count and refused_until is not None and self._clock() < refused_until:
            return False
        try:
            disk = os.statvfs(self.config.path)
        except OSError as exc:
            raise StoreIOError(
                f"{self.config.path}: the free space can't be determined: {exc}"
            ) from exc
        left = disk.f_bavail * disk.f_frsize - self.config.segment_bytes
        return left >= self.config.min_free_bytes

    def _begin_segment(self, free: Segment | None) -> Segment | None:
        """Start a use of a free segment, or of a new one if one may be added."""
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
            raise StoreIOError(f"{self.config.path}: a segment can't be started: {exc}") from exc
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
                    "%s: no segment can be added, recycling the oldest ones instead: %s",
                    self.config.path,
                    exc,
                )
            self._refused_until = self._clock() + GROW_RETRY_S
            raise StoreIOError(f"{path} can't be created: {exc}") from exc
        self._refused_until = None
        self._last_number += 1
        return Segment(self._last_number, file)


def _is_current(header: object) -> TypeGuard[SegmentHeader]:
    """Whether this is a segment's header, and the records after it have this release's layout."""
    return isinstance(header, SegmentHeader) and (
        (header.version, header.records) == (KEY_VERSION, RECORD_VERSION)
    )


def aligned_buffer(nbytes: int) -> memoryview:
    """Page-aligned memory, as direct I/O requires."""
    return memoryview(mmap.mmap(-1, nbytes))


def _records_in(
    segment: Segment, segment_bytes: int, page: memoryview
) -> Iterator[tuple[RecordHeader, int]]:
    """Yield the records of a segment's current use with their offsets, up to the first page that
    is not one."""
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


def _unusable(path: Path, error: OSError | StoreIOError) -> KVConfigError:
    advice = ""
    if isinstance(error, PermissionError):
        advice = f"; give it, and the files in it, to the store's user (uid {os.geteuid()})"
    return KVConfigError(f"{path} can't be used for a store: {error}{advice}")


def _lock_directory(path: Path) -> int:
    try:
        file = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as exc:
        # Creating it would hide that a drive is not mounted, and fill the file system below.
        raise KVConfigError(
            f"{path} can't be used for a store: there is no such directory; mount its drive, or "
            "create it"
        ) from exc
    except OSError as exc:
        raise _unusable(path, exc) from exc
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(file)
        raise KVConfigError(
            f"{path} is in use by another store; give each a directory of its own"
        ) from exc
    return file
