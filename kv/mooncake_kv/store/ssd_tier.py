"""The SSD tier of a node store: the index of all chunks on SSDs, and which chunks to write there.

``NodeStore`` owns the tier and ``TierMoves`` moves chunks between it and memory. ``ssd_drive`` runs
the threads of each drive, and ``ssd_directory`` lays out its files.

* Writes: a chunk is written on its second use, since most chunks are never used again and SSDs
  wear out. A chunk that exceeds the daily write budget, or that finds the write queue full, is
  skipped; the caller never blocks.
* Reads: the chunks of one prompt are read layer by layer, the leading bytes of all of them first.
* Hung drives: a drive with a read past its timeout is considered hung, and its chunks are
  unavailable until that read completes. A drive with a write past its timeout is still read, but
  gets no new writes until that write completes.
* Start: the drives are scanned in the background, each on a thread of its own. A drive gets no
  writes before its scan has completed.
* Space: whole segments are collected, the oldest first. Records that have been read since they were
  written are copied to the current segment before.
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
from mooncake_kv.store.ssd_config import SsdBudget, SsdConfig
from mooncake_kv.store.ssd_directory import (
    RecordLocation,
    ScannedRecord,
    SsdDirectory,
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
"""Upper bound of the keys remembered to recognise a second put; the oldest are forgotten first."""
MAX_REMEMBERED_DROPS = 1 << 18
"""Upper bound of the keys dropped during the scan at start, which the scan must not index. Chunks
dropped beyond it reappear once their records are scanned, as they would after a restart."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that ``close`` waits for I/O in flight, for all drives together."""
CHUNKS_PER_REPORT = 256
"""Chunks found by the scan that are reported in one call of ``on_found``."""
MAX_REWRITTEN_FRACTION = 0.5
"""Upper bound of the records that collecting a segment rewrites, as a fraction of the segment."""


@dataclass(slots=True, eq=False)
class _Record:
    """The index entry of a chunk on an SSD.

    Args:
        chunk: the chunk's description.
        drive: the drive that has its record.
        location: where the record is on the drive.
        header: the record's header.
        num_reads: completed reads by users since the record was written.
    """

    chunk: Chunk
    drive: Drive
    location: RecordLocation
    header: RecordHeader
    num_reads: int = 0


class SsdTier:
    """The chunks of all directories. Thread-safe; apart from ``start``, ``verify`` and ``close``,
    no method blocks on a drive.

    Args:
        config: directories, budget, threads and timeouts.
        view: returns a range of the arena, by offset and length, to read chunks into and write them
            from.
        clock: monotonic seconds.
        on_removed: called with the keys of chunks that the tier removed by itself, on one of its
            threads.
        on_found: called with the chunks that the scan at start has found, on the scanning thread;
            may block it.

    Raises:
        KVConfigError: a directory's capacity is too small.
    """

    def __init__(
        self,
        config: SsdConfig,
        view: Callable[[int, int], memoryview],
        clock: Callable[[], float],
        on_removed: Callable[[Sequence[bytes]], None],
        on_found: Callable[[Sequence[Chunk]], None],
    ) -> None:
        self._config = config
        self._view = view
        self._clock = clock
        self._on_removed = on_removed
        self._on_found = on_found
        self._lock = threading.Lock()
        self._stats = StoreStats()
        self._records: dict[bytes, _Record] = {}
        self._writing: dict[bytes, Chunk] = {}
        self._put_before: OrderedDict[bytes, None] = OrderedDict()
        self._budget = SsdBudget(config.write_bytes_per_day)
        self._dropped_unscanned: dict[bytes, None] = {}
        directories = [SsdDirectory(each, clock) for each in config.directories]
        self._drives = [
            Drive(directory, config, number, clock, self._process_write, self._scan)
            for number, directory in enumerate(directories)
        ]

    def start(self) -> None:
        """Open and scan all directories. Scans that take longer than ``read_timeout_s`` continue in
        the background.

        Raises:
            KVConfigError: a directory can't be used; the tier is closed.
        """
        try:
            start_drives(self._drives, self._config.read_timeout_s)
        except BaseException:
            self.close()
            raise

    def chunk(self, key: bytes) -> Chunk | None:
        """The description of the chunk stored under a key; None if there is none."""
        record = self._records.get(key)
        return None if record is None else record.chunk

    def is_available(self, key: bytes) -> bool:
        """Whether reads of the chunk's drive are not hung. A chunk that was found at start may be
        on another drive than the one to which it would be written now."""
        record = self._records.get(key)
        drive = self._drive_of(key) if record is None else record.drive
        return not drive.reading.is_hung()

    @property
    def has_hung_reads(self) -> bool:
        """Whether reads of any drive are hung."""
        return any(drive.reading.is_hung() for drive in self._drives)

    def chunks(self) -> list[Chunk]:
        """All chunks in the index."""
        with self._lock:
            return [record.chunk for record in self._records.values()]

    def note_put(self, key: bytes) -> bool:
        """Remember that a chunk was put into memory; returns whether it had been put before."""
        with self._lock:
            is_known = key in self._put_before
            self._put_before[key] = None
            self._put_before.move_to_end(key)
            if len(self._put_before) > MAX_REMEMBERED_PUTS:
                self._put_before.popitem(last=False)
            if not is_known:
                self._count_skip("first_touch")
        return is_known

    def admit(self, chunk: Chunk) -> bool:
        """Decide whether to write a chunk that was used again; counts the reason if not. If so,
        ``write`` or ``withdraw`` must follow."""
        with self._lock:
            if chunk.key in self._records or chunk.key in self._writing or not self._drives:
                return False
            drive = self._drive_for(chunk)
            if drive is None:
                reason = "too_large"
            elif drive.is_hung():
                reason = "hung"
            elif not drive.is_scanned:
                reason = "unscanned"
            elif drive.num_queued_writes >= self._config.max_queued_writes:
                reason = "busy"
            elif not self._budget.take(record_bytes(chunk.nbytes), self._clock()):
                reason = "budget"
            else:
                self._writing[chunk.key] = chunk
                drive.num_queued_writes += 1
                return True
            self._count_skip(reason)
            return False

    def withdraw(self, chunk: Chunk) -> None:
        """Undo ``admit``: the chunk will not be written."""
        drive = self._drive_for(chunk)
        assert drive is not None
        with self._lock:
            if self._writing.get(chunk.key) is chunk:
                del self._writing[chunk.key]
            drive.num_queued_writes -= 1

    def write(self, write: ChunkWrite) -> None:
        """Queue the write of an admitted chunk."""
        self._drive_of(write.chunk.key).writers.add([write])

    def cancel_hung_writes(self) -> None:
        """Cancel the writes queued for hung drives, to release the memory that they pin."""
        for drive in self._drives:
            if drive.is_hung():
                for write in drive.writers.cancel_queued():
                    self._skip_hung_write(write)

    def read(self, wanted: Sequence[ChunkRead], first_bytes: int | None = None) -> None:
        """Queue reads of chunks into memory.

        Args:
            wanted: the chunks, in the order in which they are needed.
            first_bytes: read this many leading bytes of every chunk first, then the next part of
                every chunk, and so on in small parts. None: read each chunk in one request.
        """
        running: dict[Drive, list[RecordRead]] = {}
        for each in wanted:
            record = self._records.get(each.key)
            if record is None or not self._hold(record):
                each.on_done(False)
            else:
                reads = running.setdefault(record.drive, [])
                reads.append(self._reading(record, each, first_bytes))
        for drive, reads in running.items():
            most = max(len(read.parts) for read in reads)
            drive.readers.add(
                [(read, n) for n in range(most) for read in reads if n < len(read.parts)]
            )

    def _reading(self, record: _Record, wanted: ChunkRead, first_bytes: int | None) -> RecordRead:
        """Create the read of a record that is held."""

        def read_range(start: int, stop: int) -> bool:
            return self._read(record, start, self._view(wanted.offset + start, stop - start))

        def on_done(is_intact: bool, is_wrong: bool) -> None:
            record.num_reads += is_intact
            self._end_read(record, is_intact=not is_wrong)
            wanted.on_done(is_intact)

        parts = parts_to_read(record.chunk.nbytes, first_bytes)
        return RecordRead(parts, read_range, wanted.is_wanted, wanted.on_progress, on_done)

    def forget(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove chunks from the index and cancel their writes; returns the keys that were
        indexed."""
        with self._lock:
            forgotten = list(keys)
            for key in forgotten:
                self._writing.pop(key, None)
            removed = [key for key in forgotten if self._unindex(key)]
            if all(drive.is_scanned for drive in self._drives):
                self._dropped_unscanned.clear()
            else:
                left = MAX_REMEMBERED_DROPS - len(self._dropped_unscanned)
                self._dropped_unscanned.update(dict.fromkeys(forgotten[: max(0, left)]))
            return removed

    def verify(self) -> tuple[int, int]:
        """Read and check every record; blocks until all are read.

        Returns:
            The number of intact records, and of damaged ones, which are removed from the index.
        """
        num_intact = num_damaged = 0
        buffer = aligned_buffer(max((d.directory.max_chunk_bytes for d in self._drives), default=1))
        for chunk in self.chunks():
            record = self._records.get(chunk.key)
            if record is not None and self._hold(record):
                is_intact = self._read_whole(record, buffer[: rounded_up(chunk.nbytes)])
                num_intact += is_intact
                num_damaged += not is_intact
        return num_intact, num_damaged

    def fill_stats(self, stats: StoreStats) -> None:
        """Set the SSD fields of ``stats``."""
        with self._lock:
            own = self._stats
            stats.ssd_chunks = len(self._records)
            stats.ssd_bytes = own.ssd_bytes
            stats.ssd_capacity_bytes = sum(d.capacity_bytes for d in self._config.directories)
            stats.ssd_written_bytes = own.ssd_written_bytes
            stats.ssd_read_bytes = own.ssd_read_bytes
            stats.ssd_write_bytes_per_day = self._budget.bytes_per_day
            stats.ssd_budget_bytes = self._budget.left(self._clock())
            stats.num_ssd_corrupt, stats.num_ssd_errors = own.num_ssd_corrupt, own.num_ssd_errors
            stats.num_ssd_skipped = dict(own.num_ssd_skipped)
            stats.num_ssd_hung_reads = sum(drive.reading.is_hung() for drive in self._drives)
            stats.num_ssd_hung_writes = sum(drive.writing.is_hung() for drive in self._drives)
            stats.num_ssd_unscanned = sum(not drive.is_scanned for drive in self._drives)

    def close(self) -> None:
        """Wait for I/O in flight and unlock the directories. A drive that is still busy after
        CLOSE_TIMEOUT_S is abandoned, with its directory locked. Idempotent."""
        for drive in self._drives:
            drive.stop()
        until = time.monotonic() + CLOSE_TIMEOUT_S
        for drive in self._drives:
            drive.close(until)

    # -- on the tier's threads ------------------------------------------------------------------

    def _scan(self, drive: Drive) -> None:
        """Index all records of a drive; runs on its scanning thread."""
        with self._lock:
            self._stats.num_ssd_errors += drive.directory.num_unreadable
        found: list[Chunk] = []
        for record in drive.scanned():
            found += self._index_scanned(drive, record)
            if len(found) >= CHUNKS_PER_REPORT:
                self._on_found(found)
                found = []
        if not drive.is_stopping:  # else the receiver may be closed
            self._on_found(found)

    def _index_scanned(self, drive: Drive, found: ScannedRecord) -> list[Chunk]:
        """Index a scanned record; returns its chunk unless that is dropped or indexed already."""
        try:
            chunk = found.header.chunk()
        except ValueError as exc:  # written by a release with larger limits
            logger.warning("%s: a record is not valid: %s", drive.directory.config.path, exc)
            with self._lock:
                self._stats.num_ssd_corrupt += 1
            return []
        with self._lock:
            if chunk.key in self._dropped_unscanned:
                return []
            is_new = chunk.key not in self._records
            self._index(_Record(chunk, drive, found.location, found.header))
        return [chunk] if is_new else []

    def _process_write(self, write: ChunkWrite) -> None:
        """Top of a writing thread."""
        drive = self._drive_of(write.chunk.key)
        if drive.is_hung():
            self._skip_hung_write(write)
            return
        is_stored = False
        try:
            is_stored = self._write(drive, write)
        except Exception as exc:  # noqa: BLE001  # thread top: fails this chunk only
            self._count_error(exc)
        finally:
            self.withdraw(write.chunk)
            write.on_done(is_stored)
        self._collect(drive)

    def _skip_hung_write(self, write: ChunkWrite) -> None:
        """Skip an admitted write because its drive is hung."""
        with self._lock:
            self._count_skip("hung")
        self.withdraw(write.chunk)
        write.on_done(False)

    def _write(self, drive: Drive, write: ChunkWrite) -> bool:
        chunk = write.chunk
        try:
            location = drive.append(chunk.nbytes)
            if location is None and not drive.is_hung():
                # another thread's write has filled the last segment and is collecting one
                segment_bytes = drive.directory.config.segment_bytes
                self._collect(drive, wait_s=drive.writing.limit_s(segment_bytes))
                location = drive.append(chunk.nbytes)
        except StoreIOError as exc:
            self._count_error(exc)
            return False
        if location is None:
            with self._lock:
                self._count_skip("hung" if drive.is_hung() else "full")
            return False
        with self._writing_at(drive.directory, location):
            payload = self._view(write.offset, rounded_up(chunk.nbytes))
            header = record_header(chunk, location.use, payload)
            # The checksums cover the memory's bytes up to now. If the memory had been reused for
            # another chunk before, they would match the wrong bytes, so the record is made void.
            # Bytes that change from here on don't match them, which a later read detects.
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
        """Write a record and index it. Returns False without indexing it if the record is void, if
        ``is_held`` says that the memory was reused during the write, or if ``is_wanted`` says that
        the chunk was forgotten in the meantime."""
        page = aligned_buffer(PAGE)
        fill_page(page, record.header)
        record.drive.write(record.location, page, payload)
        is_intact = bool(record.header.key) and is_held()
        with self._lock:
            self._stats.ssd_written_bytes += len(page) + len(payload)
            is_stored = is_intact and is_wanted()
            if is_stored:
                self._index(record)
        return is_stored

    @contextmanager
    def _writing_at(self, directory: SsdDirectory, location: RecordLocation) -> Iterator[None]:
        """Guard the write of a record. An exception does not propagate: it is counted, and later
        records go to another segment."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001  # thread top: fails this record only
            directory.leave_hole(location)
            self._count_error(exc)
        finally:  # last: collecting the segment must see the record in the index
            directory.release(location)

    def _hold(self, record: _Record) -> bool:
        """Keep a record's segment from being collected until ``_end_read``. False: it has been
        collected already; a stale index entry is removed, or every lookup would retry the read."""
        if record.drive.directory.hold(record.location):
            return True
        self._remove(record)
        return False

    def _remove(self, record: _Record) -> None:
        """Remove a record from the index, but not another one of its chunk that has replaced it."""
        with self._lock:
            is_gone = self._is_indexed(record) and self._unindex(record.chunk.key)
        if is_gone:
            self._on_removed([record.chunk.key])

    def _read_whole(self, record: _Record, payload: memoryview) -> bool:
        """Read a held record on this thread, end the hold, and return whether it is intact."""
        is_intact = False
        try:
            with record.drive.reading.watched(len(payload)):
                is_intact = self._read(record, None, payload)
        finally:
            self._end_read(record, is_intact=is_intact)
        return is_intact

    def _read(self, record: _Record, start: int | None, payload: memoryview) -> bool:
        """Read a part of a held record, or all of it with its header page if ``start`` is None;
        returns whether its checksums match."""
        directory, location, header = record.drive.directory, record.location, record.header
        try:
            if start is None:
                is_intact = read_record(directory, location, header, payload)
            else:
                is_intact = read_part(directory, location, header, start, payload)
        except StoreIOError as exc:
            self._count_error(exc)
            return False
        with self._lock:
            self._stats.ssd_read_bytes += len(payload) + (PAGE if start is None else 0)
            self._stats.num_ssd_corrupt += not is_intact
        if not is_intact:
            logger.warning(
                "%s: the record of chunk %s is damaged in the %d bytes from byte %d; it is in "
                "segment %d at offset %d",
                directory.config.path,
                record.chunk.key.hex(),
                len(payload),
                start or 0,
                location.segment.number,
                location.offset,
            )
        return is_intact

    def _end_read(self, record: _Record, *, is_intact: bool) -> None:
        """End a hold, once no read of the record is in flight. A damaged record is removed."""
        record.drive.directory.release(record.location)
        if not is_intact:
            self._remove(record)

    def _collect(self, drive: Drive, *, wait_s: float = 0.0) -> None:
        """Empty the oldest segment if no other one is left to write to next.

        If another thread is collecting, wait up to ``wait_s`` for it, and return if it takes
        longer. A drive that is stopped in the meantime keeps the segment's chunks.
        """
        if not drive.collecting.acquire(timeout=wait_s):
            return
        try:
            segment = drive.segment_to_collect(wait_s)
            if segment is None or drive.is_stopping:
                return
            use = segment.use
            with self._lock:
                keys = list(drive.keys_of_use.get(use, ()))
            self._rewrite_hot(drive, keys)
            if drive.is_stopping:
                return
            self._forget_use(drive, use)
            if drive.directory.recycle(segment):  # no write to it is in flight any more:
                self._forget_use(drive, use)  # remove what was indexed since the first call
        except StoreIOError as exc:
            self._count_error(exc)
        finally:
            drive.collecting.release()

    def _forget_use(self, drive: Drive, use: bytes) -> None:
        """Remove the chunks of a segment's use from the index, and report them."""
        with self._lock:
            removed = [key for key in [*drive.keys_of_use.get(use, ())] if self._unindex(key)]
        if removed:
            self._on_removed(removed)

    def _rewrite_hot(self, drive: Drive, keys: Iterable[bytes]) -> None:
        """Rewrite the chunks that have been read since they were written, the most read first, to
        the current segment."""
        records = [record for key in keys if (record := self._records.get(key)) is not None]
        hot = sorted((r for r in records if r.num_reads), key=lambda r: -r.num_reads)
        left = int(drive.directory.config.segment_bytes * MAX_REWRITTEN_FRACTION)
        for record in hot:
            left -= record_bytes(record.chunk.nbytes)
            if left < 0 or drive.is_stopping or not self._take_budget(record.chunk):
                return
            payload = aligned_buffer(rounded_up(record.chunk.nbytes))
            if not self._hold(record) or not self._read_whole(record, payload):
                continue
            try:
                location = drive.append(record.chunk.nbytes)
            except StoreIOError as exc:
                self._count_error(exc)
                return
            if location is None:
                return
            with self._writing_at(drive.directory, location):
                header = record_header(record.chunk, location.use, payload)
                again = _Record(record.chunk, drive, location, header)
                self._put_record(again, payload, lambda: True, partial(self._is_indexed, record))

    # -- the index; with the lock held, except for single look-ups ---------------------------------

    def _drive_of(self, key: bytes) -> Drive:
        """The drive to which a chunk is written, chosen by its key."""
        return self._drives[int.from_bytes(key[:4], "big") % len(self._drives)]

    def _drive_for(self, chunk: Chunk) -> Drive | None:
        """The drive of a chunk; None if the chunk is larger than its segments."""
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

    def _take_budget(self, chunk: Chunk) -> bool:
        with self._lock:
            return self._budget.take(record_bytes(chunk.nbytes), self._clock())

    def _count_skip(self, reason: str) -> None:
        skipped = self._stats.num_ssd_skipped
        skipped[reason] = skipped.get(reason, 0) + 1

    def _count_error(self, error: Exception) -> None:
        with self._lock:
            self._stats.num_ssd_errors += 1
            is_first = self._stats.num_ssd_errors == 1
        logger.log(
            logging.WARNING if is_first else logging.DEBUG,
            "%s",
            error,
            exc_info=None if isinstance(error, StoreIOError) else error,
        )
