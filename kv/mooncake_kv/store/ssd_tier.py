"""Chunks on SSDs: which are there, and what is worth writing. Their drives are ``ssd_drive``'s.

Chunks are written when they are used a second time: most are never used again, and drives wear.
What does not fit the day's budget, or finds the queue full, is not written; nothing waits for it.
Chunks of one prompt are read layer by layer: the beginning of all of them first.
A drive that has not ended a read for a while hangs: its chunks are not there until it does. One
that does not end a write is read on, and nothing more is written there until it does.
What is there at start is found in the background, drive by drive; nothing is written there before.
Whole segments are collected, the oldest first; records that were read since they were written are
written again before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from mooncake_kv.errors import StoreIOError
from mooncake_kv.store.arena_allocator import rounded_up
from mooncake_kv.store.chunk_store import Chunk, StoreStats
from mooncake_kv.store.ssd_directory import (
    RecordLocation,
    ScannedRecord,
    SsdBudget,
    SsdDirectory,
    SsdDirectoryConfig,
    aligned_buffer,
)
from mooncake_kv.store.ssd_drive import ChunkWrite, Drive, start_drives
from mooncake_kv.store.ssd_reads import ChunkRead, RecordRead, read_part, read_record
from mooncake_kv.store.ssd_records import (
    PAGE,
    RecordHeader,
    fill_page,
    parts_to_read,
    record_bytes,
    record_header,
)

logger = logging.getLogger(__name__)

MAX_REMEMBERED_PUTS = 1 << 18
MAX_REMEMBERED_DROPS = 1 << 18
"""While drives are scanned; more are found again, as after a restart."""
CLOSE_S = 5.0
"""How long a close waits for what drives were asked to do."""
TOLD_AT_ONCE = 256
"""Chunks that are found at start and told of at once."""
COLLECTED_FRACTION = 0.5
"""How much of a segment may be written again when it is collected."""


@dataclass(frozen=True, slots=True)
class SsdConfig:
    """The SSD tier of a store.

    Args:
        directories: each on a drive of its own, or there is no gain in several.
        write_bytes_per_day: what all drives together may be worn by; 0 is no limit.
        read_threads, write_threads: of each directory: how many requests its drive sees at once.
        max_queued_writes: per directory; what comes when it is full is not written.
        patience_s: a drive that takes longer to read a part of a chunk, beyond what the slowest
            would take for its bytes, or to open its directory, is taken to hang; and for as long a
            start waits until it is known what is there.
        write_patience_s: the same of writes: drives pause to make room.
    """

    directories: tuple[SsdDirectoryConfig, ...]
    write_bytes_per_day: int = 0
    read_threads: int = 8
    write_threads: int = 4
    max_queued_writes: int = 64
    patience_s: float = 2.0
    write_patience_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Record:
    """A chunk on an SSD.

    Args:
        chunk: what it is.
        drive: where.
        location: in there.
        header: of the record.
        num_reads: by users, since it was written.
    """

    chunk: Chunk
    drive: Drive
    location: RecordLocation
    header: RecordHeader
    num_reads: int = 0


class SsdTier:
    """The chunks of all directories. Any thread; nothing here waits for a drive.

    Args:
        config: see there.
        view: the memory that chunks are read to and written from: a piece by offset and length.
        clock: seconds.
        removed: told of chunks that the tier gave up by itself; on a thread of the tier.
        found: told of chunks that are there since before the start; on a thread of the tier, which
            it may keep waiting.

    Raises:
        KVConfigError: a directory is too small.
    """

    def __init__(
        self,
        config: SsdConfig,
        view: Callable[[int, int], memoryview],
        clock: Callable[[], float],
        removed: Callable[[Sequence[bytes]], None],
        found: Callable[[Sequence[Chunk]], None],
    ) -> None:
        self._config = config
        self._view = view
        self._clock = clock
        self._removed = removed
        self._found = found
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._records: dict[bytes, _Record] = {}
        self._writing: dict[bytes, Chunk] = {}
        self._put_before: OrderedDict[bytes, None] = OrderedDict()
        self._budget = SsdBudget(config.write_bytes_per_day)
        self._dropped_unscanned: dict[bytes, None] = {}
        directories = [SsdDirectory(each, clock) for each in config.directories]
        self._drives = [
            Drive(directory, config, number, clock, self._run_write, self._scan)
            for number, directory in enumerate(directories)
        ]

    def start(self) -> None:
        """Open all directories, and find what is there; what takes long, in the background.

        Raises:
            KVConfigError: a directory can't be used; the tier is closed.
        """
        try:
            start_drives(self._drives, self._config.patience_s)
        except BaseException:
            self.close()
            raise

    def chunk(self, key: bytes) -> Chunk | None:
        """What is stored under a key."""
        record = self._records.get(key)
        return None if record is None else record.chunk

    def answers(self, key: bytes) -> bool:
        """Whether the drive that a chunk is on does not hang. One that was found at start may be on
        another drive than it would be written to now."""
        record = self._records.get(key)
        drive = self._drive_of(key) if record is None else record.drive
        return not drive.reading.hangs()

    def chunks(self) -> list[Chunk]:
        """All that is stored."""
        with self._lock:
            return [record.chunk for record in self._records.values()]

    def note_put(self, key: bytes) -> bool:
        """Remember that a chunk was put into memory; whether it had been before."""
        with self._lock:
            is_known = key in self._put_before
            self._put_before[key] = None
            self._put_before.move_to_end(key)
            if len(self._put_before) > MAX_REMEMBERED_PUTS:
                self._put_before.popitem(last=False)
            if not is_known:
                self._skip("first_touch")
        return is_known

    def admit(self, chunk: Chunk) -> bool:
        """Whether a chunk that was used again is to be written now.

        ``write`` or ``withdraw`` must follow then.
        """
        with self._lock:
            if chunk.key in self._records or chunk.key in self._writing or not self._drives:
                return False
            drive = self._drive_for(chunk)
            if drive is None:
                self._skip("too_large")
                return False
            if drive.hangs():
                self._skip("hung")
                return False
            if not drive.is_scanned:
                self._skip("unscanned")
                return False
            if drive.num_queued_writes >= self._config.max_queued_writes:
                self._skip("busy")
                return False
            if not self._budget.take(record_bytes(chunk.nbytes), self._clock()):
                self._skip("budget")
                return False
            self._writing[chunk.key] = chunk
            drive.num_queued_writes += 1
        return True

    def withdraw(self, chunk: Chunk) -> None:
        """An admitted chunk will not be written."""
        drive = self._drive_for(chunk)
        assert drive is not None
        with self._lock:
            if self._writing.get(chunk.key) is chunk:
                del self._writing[chunk.key]
            drive.num_queued_writes -= 1

    def write(self, write: ChunkWrite) -> None:
        """Write an admitted chunk."""
        self._drive_of(write.chunk.key).writers.add([write])

    def give_up_late_writes(self) -> None:
        """Let go of what is queued for drives that hang: memory that nobody can use."""
        for drive in self._drives:
            if drive.hangs():
                for write in drive.writers.take_back():
                    self._give_up_write(write)

    def read(self, wanted: Sequence[ChunkRead], first_bytes: int | None = None) -> None:
        """Read chunks into memory.

        Args:
            wanted: which; in the order in which they are needed.
            first_bytes: so many of each are read before any more of one, and so on in small parts;
                None: each is read whole.
        """
        running: dict[Drive, list[RecordRead]] = {}
        for each in wanted:
            record = self._records.get(each.key)
            if record is None or not self._hold(record):
                each.ended(False)
            else:
                reads = running.setdefault(record.drive, [])
                reads.append(self._reading(record, each, first_bytes))
        for drive, reads in running.items():
            most = max(len(read.parts) for read in reads)
            drive.readers.add(
                [(read, n) for n in range(most) for read in reads if n < len(read.parts)]
            )

    def _reading(self, record: _Record, wanted: ChunkRead, first_bytes: int | None) -> RecordRead:
        """The read of a record that is held."""

        def read_range(start: int, stop: int) -> bool:
            return self._read(record, start, self._view(wanted.offset + start, stop - start))

        def ended(is_right: bool, is_wrong: bool) -> None:
            record.num_reads += is_right
            self._end_read(record, is_right=not is_wrong)
            wanted.ended(is_right)

        parts = parts_to_read(record.chunk.nbytes, first_bytes)
        return RecordRead(parts, read_range, wanted.is_wanted, wanted.arrived, ended)

    def forget(self, keys: Iterable[bytes]) -> list[bytes]:
        """Give chunks up, those that are being written, too; returns those that were there."""
        with self._lock:
            forgotten = list(keys)
            for key in forgotten:
                self._writing.pop(key, None)
            gone = [key for key in forgotten if self._unindex(key)]
            if all(drive.is_scanned for drive in self._drives):
                self._dropped_unscanned.clear()
            else:
                left = MAX_REMEMBERED_DROPS - len(self._dropped_unscanned)
                self._dropped_unscanned.update(dict.fromkeys(forgotten[: max(0, left)]))
            return gone

    def verify(self) -> tuple[int, int]:
        """Read every record; returns how many were right, and how many not, which are forgotten.

        Blocks for as long as that takes.
        """
        num_right = num_wrong = 0
        buffer = aligned_buffer(max((d.directory.max_chunk_bytes for d in self._drives), default=1))
        for chunk in self.chunks():
            record = self._records.get(chunk.key)
            if record is not None and self._hold(record):
                is_right = self._read_whole(record, buffer[: rounded_up(chunk.nbytes)])
                num_right += is_right
                num_wrong += not is_right
        return num_right, num_wrong

    def fill_stats(self, stats: StoreStats) -> None:
        """Set what SSDs have to do with."""
        with self._lock:
            own = self._stats
            stats.ssd_chunks = len(self._records)
            stats.ssd_bytes = own.ssd_bytes
            stats.ssd_capacity_bytes = sum(d.capacity_bytes for d in self._config.directories)
            stats.ssd_written_bytes, stats.ssd_read_bytes = (
                own.ssd_written_bytes,
                own.ssd_read_bytes,
            )
            stats.num_ssd_corrupt, stats.num_ssd_errors = own.num_ssd_corrupt, own.num_ssd_errors
            stats.num_ssd_skipped = dict(own.num_ssd_skipped)
            stats.num_ssd_hung_reads = sum(drive.reading.hangs() for drive in self._drives)
            stats.num_ssd_hung_writes = sum(drive.writing.hangs() for drive in self._drives)
            stats.num_ssd_unscanned = sum(not drive.is_scanned for drive in self._drives)

    def close(self) -> None:
        """Let what runs end, and give the directories to others; a drive that hangs is left behind
        after CLOSE_S. Idempotent."""
        for drive in self._drives:
            drive.stop()
        until = time.monotonic() + CLOSE_S
        for drive in self._drives:
            drive.close(until)

    # -- on the tier's threads ------------------------------------------------------------------

    def _scan(self, drive: Drive) -> None:
        """Find what is on a drive; on its scanning thread."""
        with self._lock:
            self._stats.num_ssd_errors += drive.directory.num_unreadable
        found: list[Chunk] = []
        for record in drive.scanned():
            found += self._index_scanned(drive, record)
            if len(found) >= TOLD_AT_ONCE:
                self._found(found)
                found = []
        if not drive.is_stopping:  # else whoever would be told may have closed
            self._found(found)

    def _index_scanned(self, drive: Drive, found: ScannedRecord) -> list[Chunk]:
        """The chunk of a record that was found, unless it was known."""
        try:
            chunk = found.header.chunk()
        except ValueError as exc:  # of a release that took more
            logger.warning("%s: a record is no chunk: %s", drive.directory.config.path, exc)
            with self._lock:
                self._stats.num_ssd_corrupt += 1
            return []
        with self._lock:
            if chunk.key in self._dropped_unscanned:
                return []
            is_new = chunk.key not in self._records
            self._index(_Record(chunk, drive, found.location, found.header))
        return [chunk] if is_new else []

    def _run_write(self, write: ChunkWrite) -> None:
        """Top of a writing thread."""
        drive = self._drive_of(write.chunk.key)
        if drive.hangs():
            self._give_up_write(write)
            return
        is_stored = False
        try:
            is_stored = self._write(drive, write)
        except Exception as exc:  # noqa: BLE001  # thread top: it is this chunk's
            self._failed(exc)
        finally:
            self.withdraw(write.chunk)
            write.ended(is_stored)
        self._collect(drive)

    def _give_up_write(self, write: ChunkWrite) -> None:
        """Its drive hangs."""
        with self._lock:
            self._skip("hung")
        self.withdraw(write.chunk)
        write.ended(False)

    def _write(self, drive: Drive, write: ChunkWrite) -> bool:
        chunk = write.chunk
        try:
            location = drive.append(chunk.nbytes)
            if location is None and not drive.hangs():
                # another thread's write has filled it, and collects
                segment_bytes = drive.directory.config.segment_bytes
                self._collect(drive, wait_s=drive.writing.limit_s(segment_bytes))
                location = drive.append(chunk.nbytes)
        except StoreIOError as exc:
            self._failed(exc)
            return False
        if location is None:
            with self._lock:
                self._skip("hung" if drive.hangs() else "full")
            return False
        with self._writing_at(drive.directory, location):
            payload = self._view(write.offset, rounded_up(chunk.nbytes))
            header = record_header(chunk, location.use, payload)
            # The checksum is of what memory had until now. Were it another chunk's by now, a wrong
            # record would look right for ever; bytes that change from here on make it look wrong.
            if not write.is_held():
                header = msgspec.structs.replace(header, key=b"")
            record = _Record(chunk, drive, location, header)
            is_wanted = partial(self._is_written, chunk)
            return self._put_record(record, payload, write.is_held, is_wanted)
        return False

    def _put_record(
        self,
        record: _Record,
        payload: memoryview,
        is_held: Callable[[], bool],
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Write a record; whether it is indexed: it is unless it is void, the memory that it was
        written from was not held until the end, or its chunk was forgotten meanwhile."""
        page = aligned_buffer(PAGE)
        fill_page(page, record.header)
        record.drive.write(record.location, page, payload)
        is_right = bool(record.header.key) and is_held()
        with self._lock:
            self._stats.ssd_written_bytes += len(page) + len(payload)
            is_stored = is_right and is_wanted()
            if is_stored:
                self._index(record)
        return is_stored

    @contextmanager
    def _writing_at(self, directory: SsdDirectory, location: RecordLocation) -> Iterator[None]:
        """Around the write of a record. One that fails, whatever the reason, ends here: it is
        counted, and those behind it go to another segment."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001  # thread top: whatever it is, it is this record's
            directory.leave_hole(location)
            self._failed(exc)
        finally:  # not before: a segment that is collected takes along what is indexed
            directory.give_up(location)

    def _hold(self, record: _Record) -> bool:
        """Keep a record from being collected until ``_end_read``. False: it was, and is forgotten,
        if it should be indexed yet: it would be looked for again and again."""
        if record.drive.directory.hold(record.location):
            return True
        with self._lock:
            is_gone = self._is_indexed(record) and self._unindex(record.chunk.key)
        if is_gone:
            self._removed([record.chunk.key])
        return False

    def _read_whole(self, record: _Record, payload: memoryview) -> bool:
        """Read all of a record that is held here and now; whether it is right."""
        is_right = False
        try:
            with record.drive.reading.watched(len(payload)):
                is_right = self._read(record, None, payload)
        finally:
            self._end_read(record, is_right=is_right)
        return is_right

    def _read(self, record: _Record, start: int | None, payload: memoryview) -> bool:
        """Read a part of a record that is held, or, without a ``start``, all of it, its page, too;
        whether it is right."""
        directory, location, header = record.drive.directory, record.location, record.header
        try:
            if start is None:
                is_right = read_record(directory, location, header, payload)
            else:
                is_right = read_part(directory, location, header, start, payload)
        except StoreIOError as exc:
            self._failed(exc)
            return False
        with self._lock:
            self._stats.ssd_read_bytes += len(payload) + (PAGE if start is None else 0)
            self._stats.num_ssd_corrupt += not is_right
        if not is_right:
            logger.warning(
                "%s: a record is damaged: of chunk %s, %d bytes from byte %d on; segment %d at %d",
                directory.config.path,
                record.chunk.key.hex(),
                len(payload),
                start or 0,
                location.segment.number,
                location.offset,
            )
        return is_right

    def _end_read(self, record: _Record, *, is_right: bool) -> None:
        """Nothing of a record that was held is read any more."""
        record.drive.directory.give_up(record.location)
        if not is_right and (gone := self.forget([record.chunk.key])):
            self._removed(gone)

    def _collect(self, drive: Drive, *, wait_s: float = 0.0) -> None:
        """Empty the oldest segment, if the next one to begin would have to be it; while another
        thread does so, wait so long for that, or leave it alone. A drive that is stopped meanwhile
        keeps what it has."""
        if not drive.collecting.acquire(timeout=wait_s):
            return
        try:
            segment = drive.wants_collection(wait_s)
            if segment is None or drive.is_stopping:
                return
            use = segment.use
            with self._lock:
                keys = list(drive.keys_of_use.get(use, ()))
            self._keep_hot(drive, keys)
            if drive.is_stopping:
                return
            self._forget_use(drive, use)
            if drive.directory.recycle(segment):  # nothing is written to it any more
                self._forget_use(drive, use)
        except StoreIOError as exc:
            self._failed(exc)
        finally:
            drive.collecting.release()

    def _forget_use(self, drive: Drive, use: bytes) -> None:
        """Forget what lies in a use of a segment, that is indexed by now."""
        with self._lock:
            gone = [key for key in [*drive.keys_of_use.get(use, ())] if self._unindex(key)]
        if gone:
            self._removed(gone)

    def _keep_hot(self, drive: Drive, keys: Iterable[bytes]) -> None:
        """Write those that were read again, the most read first, into the segment of now."""
        records = [record for key in keys if (record := self._records.get(key)) is not None]
        hot = sorted((r for r in records if r.num_reads), key=lambda r: -r.num_reads)
        left = int(drive.directory.config.segment_bytes * COLLECTED_FRACTION)
        for record in hot:
            left -= record_bytes(record.chunk.nbytes)
            if left < 0 or drive.is_stopping or not self._budget_for(record.chunk):
                return
            payload = aligned_buffer(rounded_up(record.chunk.nbytes))
            if not self._hold(record) or not self._read_whole(record, payload):
                continue
            try:
                location = drive.append(record.chunk.nbytes)
            except StoreIOError as exc:
                self._failed(exc)
                return
            if location is None:
                return
            with self._writing_at(drive.directory, location):
                header = record_header(record.chunk, location.use, payload)
                again = _Record(record.chunk, drive, location, header)
                self._put_record(again, payload, lambda: True, partial(self._is_indexed, record))

    # -- the index; the lock held, but for single look-ups -----------------------------------------

    def _drive_of(self, key: bytes) -> Drive:
        """A chunk is written on one drive only."""
        return self._drives[int.from_bytes(key[:4], "big") % len(self._drives)]

    def _drive_for(self, chunk: Chunk) -> Drive | None:
        """Its drive, if it fits there."""
        drive = self._drive_of(chunk.key)
        return drive if chunk.nbytes <= drive.directory.max_chunk_bytes else None

    def _index(self, record: _Record) -> None:
        key = record.chunk.key
        self._unindex(key)
        self._records[key] = record
        self._stats.ssd_bytes += record_bytes(record.chunk.nbytes)
        record.drive.keys_of_use.setdefault(record.location.use, {})[key] = None

    def _unindex(self, key: bytes) -> bool:
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._stats.ssd_bytes -= record_bytes(record.chunk.nbytes)
        keys = record.drive.keys_of_use[record.location.use]
        del keys[key]
        if not keys:
            del record.drive.keys_of_use[record.location.use]
        return True

    def _is_written(self, chunk: Chunk) -> bool:
        return self._writing.get(chunk.key) is chunk

    def _is_indexed(self, record: _Record) -> bool:
        return self._records.get(record.chunk.key) is record

    def _budget_for(self, chunk: Chunk) -> bool:
        with self._lock:
            return self._budget.take(record_bytes(chunk.nbytes), self._clock())

    def _skip(self, reason: str) -> None:
        skipped = self._stats.num_ssd_skipped
        skipped[reason] = skipped.get(reason, 0) + 1

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._stats.num_ssd_errors += 1
            is_first = self._stats.num_ssd_errors == 1
        logger.log(
            logging.WARNING if is_first else logging.DEBUG,
            "%s",
            error,
            exc_info=None if isinstance(error, StoreIOError) else error,
        )
