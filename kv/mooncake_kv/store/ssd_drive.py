"""One drive of an SSD tier: its directory, its I/O threads, and the detection of hung I/O.

I/O on a hung drive blocks in the kernel and can't be cancelled. So a drive's threads are daemons,
requests that are still queued can be taken back, and ``close`` abandons threads that don't end
within its timeout. Reads and writes are watched separately, since some failing drives can still be
read when they no longer complete writes. Each directory is opened and scanned on a thread of its
own, so that neither a hung drive nor one with millions of records delays the store's start.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mooncake_kv.store.chunk_store import Chunk
from mooncake_kv.store.daemon_threads import DaemonThreads
from mooncake_kv.store.ssd_config import SsdConfig
from mooncake_kv.store.ssd_directory import (
    RecordLocation,
    ScannedRecord,
    Segment,
    SsdDirectory,
)
from mooncake_kv.store.ssd_reads import RecordRead
from mooncake_kv.store.ssd_records import PAGE

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 10e6
"""Throughput that one thread of several gets from the slowest supported drive; timeouts grow with
the bytes of a request at this rate."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """A request to write a chunk.

    Args:
        chunk: the chunk's description.
        offset: where its bytes are in the arena.
        is_held: returns whether that memory has held the chunk's bytes until now.
        on_done: called once with whether the chunk is stored, on a thread of the tier or on the
            thread that cancels the write.
    """

    chunk: Chunk
    offset: int
    is_held: Callable[[], bool]
    on_done: Callable[[bool], None]


class HangWatch:
    """Detects requests to a drive that exceed their timeout. Thread-safe.

    Args:
        path: the drive's directory, for the log.
        timeout_s: timeout in seconds, on top of the time that the slowest supported drive takes
            for a request's bytes.
        clock: monotonic seconds.
        on_hang, on_recovery: log messages for the start and for the end of a hang.
    """

    def __init__(
        self,
        path: Path,
        timeout_s: float,
        clock: Callable[[], float],
        *,
        on_hang: str,
        on_recovery: str,
    ) -> None:
        self.timeout_s = timeout_s
        self._path = path
        self._clock = clock
        self._on_hang = on_hang
        self._on_recovery = on_recovery
        self._late_at: dict[object, float] = {}
        self._was_hung = False

    def limit_s(self, nbytes: int) -> float:
        """Timeout in seconds of a request for this many bytes."""
        return self.timeout_s + nbytes / SLOWEST_BYTES_PER_S

    @contextmanager
    def watched(self, nbytes: int) -> Iterator[None]:
        """Watch the request that runs in the ``with`` block."""
        name = object()
        self._late_at[name] = self._clock() + self.limit_s(nbytes)
        try:
            yield
        finally:
            del self._late_at[name]

    def is_hung(self) -> bool:
        """Whether a request is past its timeout; logs every change of the answer."""
        is_hung = self._clock() > min([*self._late_at.values()], default=math.inf)
        if is_hung is not self._was_hung:
            self._was_hung = is_hung
            logger.warning("%s: %s", self._path, self._on_hang if is_hung else self._on_recovery)
        return is_hung


class Drive:
    """A directory with its I/O threads. Owned by ``SsdTier``.

    Args:
        directory: the directory; the drive opens and closes it.
        config: configuration of the tier.
        number: index among the tier's drives, for thread names.
        clock: monotonic seconds.
        write: writes a chunk; called on a writing thread.
        scan: consumes ``scanned``; called on the scanning thread.
    """

    def __init__(
        self,
        directory: SsdDirectory,
        config: SsdConfig,
        number: int,
        clock: Callable[[], float],
        write: Callable[[ChunkWrite], None],
        scan: Callable[[Drive], None],
    ) -> None:
        path = directory.config.path
        self.directory = directory
        self._scan = scan
        self._known: Future[None] = Future()
        self._scanner = threading.Thread(
            target=self._open_and_scan, name=f"ssd-scan-{number}", daemon=True
        )
        self.reading = HangWatch(
            path,
            config.read_timeout_s,
            clock,
            on_hang="a read has timed out: the chunks of this drive are unavailable until it "
            "completes",
            on_recovery="reads complete again",
        )
        self.writing = HangWatch(
            path,
            config.write_timeout_s,
            clock,
            on_hang="a write has timed out: this drive is only read until it completes",
            on_recovery="writes complete again",
        )
        self.readers = DaemonThreads(f"ssd-read-{number}", config.read_threads, self._read)
        self.writers = DaemonThreads(f"ssd-write-{number}", config.write_threads, write)
        self.num_queued_writes = 0
        self.keys_of_use: dict[bytes, dict[bytes, None]] = {}
        self.collecting = threading.Lock()
        self.is_scanned = False
        """Whether all records of the drive are indexed. Writes wait for that."""
        self.is_stopping = False

    def start(self) -> Future[None]:
        """Open the directory and scan it in the background. May be called once.

        Returns:
            A future that is done when the scan has completed, or has failed with what
            ``SsdDirectory.open`` raised.
        """
        self._scanner.start()
        return self._known

    def scanned(self) -> Iterator[ScannedRecord]:
        """``SsdDirectory.scan`` with hang detection; ends early when the drive is stopped."""
        records = self.directory.scan()
        while not self.is_stopping:
            with self.reading.watched(PAGE):
                found = next(records, None)
            if found is None or self.is_stopping:
                return
            yield found

    def is_hung(self) -> bool:
        """Whether the drive must get no writes. Hung reads count too, since a write may have to
        read records to collect a segment."""
        return self.writing.is_hung() or self.reading.is_hung()

    def append(self, nbytes: int) -> RecordLocation | None:
        """``SsdDirectory.append`` with hang detection."""
        segment_bytes = self.directory.config.segment_bytes
        with self.writing.watched(segment_bytes):
            return self.directory.append(nbytes, self.writing.limit_s(segment_bytes))

    def write(self, location: RecordLocation, page: memoryview, payload: memoryview) -> None:
        """``SsdDirectory.write`` with hang detection."""
        with self.writing.watched(len(page) + len(payload)):
            self.directory.write(location, page, payload)

    def segment_to_collect(self, wait_s: float) -> Segment | None:
        """``SsdDirectory.segment_to_collect`` with hang detection."""
        with self.writing.watched(self.directory.config.segment_bytes):
            return self.directory.segment_to_collect(wait_s)

    def stop(self) -> None:
        """Start no more requests, and drop those that are queued."""
        self.is_stopping = True
        for threads in (self.readers, self.writers):
            threads.cancel_queued()
            threads.close()

    def close(self, until: float) -> None:
        """Wait for the threads until a time of ``time.monotonic``, then close and unlock the
        directory. If a thread still runs by then, the directory stays open and locked until this
        process exits."""
        self.stop()
        if self._scanner.ident is not None:  # the thread was started
            self._scanner.join(max(0.0, until - time.monotonic()))
        joined = [self.readers.join(until), self.writers.join(until)]
        if all(joined) and not self._scanner.is_alive():
            self.directory.close()
        else:
            logger.warning(
                "%s: the drive is hung; its files stay open, and the directory locked, until this "
                "process exits",
                self.directory.config.path,
            )

    def _open_and_scan(self) -> None:
        """Top of the scanning thread."""
        try:
            with self.reading.watched(PAGE):
                self.directory.open()
            self._scan(self)
            self.is_scanned = not self.is_stopping
        except Exception as exc:  # noqa: BLE001  # thread top: the future carries it
            self._known.set_exception(exc)
        else:
            self._known.set_result(None)

    def _read(self, part: tuple[RecordRead, int]) -> None:
        """Top of a reading thread."""
        read, index = part
        start, stop = read.parts[index]
        with self.reading.watched(stop - start):
            read.run(index)


def start_drives(drives: Sequence[Drive], wait_s: float) -> None:
    """Start all drives in parallel, and wait up to ``wait_s`` for their scans.

    Raises:
        KVConfigError: a directory can't be used. A failure after ``wait_s`` is logged instead.
    """
    known = [drive.start() for drive in drives]
    wait(known, wait_s)
    for drive, future in zip(drives, known, strict=True):
        if future.done():
            future.result()
        else:
            path = drive.directory.config.path
            logger.info("%s: the scan continues in the background", path)
            future.add_done_callback(partial(_log_failure, path))


def _log_failure(path: Path, known: Future[None]) -> None:
    if (error := known.exception()) is not None:
        logger.warning(
            "%s: the scan failed, nothing is written there: %s", path, error, exc_info=error
        )
