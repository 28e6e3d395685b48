"""One drive of an SSD tier: its directory, its threads, and whether it hangs.

What a drive that hangs was asked to do stays in the kernel, and nothing ends it. So its threads are
daemons, what is queued for them can be taken back, and who closes leaves them behind after a while.
Reads and writes are watched apart: some drives are read when nothing can be written any more.
A directory is opened and scanned on a thread of its own: a drive that hangs then, or has millions
of records, keeps nobody waiting.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from mooncake_kv.store.chunk_store import Chunk
from mooncake_kv.store.ssd_directory import (
    RecordLocation,
    ScannedRecord,
    Segment,
    SsdDirectory,
)
from mooncake_kv.store.ssd_reads import RecordRead
from mooncake_kv.store.ssd_records import PAGE

if TYPE_CHECKING:
    from mooncake_kv.store.ssd_tier import SsdConfig

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_S = 10e6
"""What a drive gives one of several readers or writers at the least."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """A chunk that is to be written.

    Args:
        chunk: what it is.
        offset: of its bytes in memory.
        is_held: whether these bytes are the chunk's to this moment.
        ended: called once, on a thread of the tier or of whoever gives the write up: whether the
            tier has it now.
    """

    chunk: Chunk
    offset: int
    is_held: Callable[[], bool]
    ended: Callable[[bool], None]


class HangWatch:
    """Whether what a drive is asked to do ends. Any thread.

    Args:
        path: of its directory.
        patience_s: beyond what the slowest drive would take for the bytes.
        clock: seconds.
        news: for the log: that it hangs, and that it is over.
    """

    def __init__(
        self, path: Path, patience_s: float, clock: Callable[[], float], news: tuple[str, str]
    ) -> None:
        self.patience_s = patience_s
        self._path = path
        self._clock = clock
        self._news = news
        self._late_at: dict[object, float] = {}
        self._hung = False

    def limit_s(self, nbytes: int) -> float:
        """How long a drive that does not hang may take for so many bytes."""
        return self.patience_s + nbytes / SLOWEST_BYTES_PER_S

    @contextmanager
    def watched(self, nbytes: int) -> Iterator[None]:
        """Around what a drive is asked to do."""
        name = object()
        self._late_at[name] = self._clock() + self.limit_s(nbytes)
        try:
            yield
        finally:
            del self._late_at[name]

    def hangs(self) -> bool:
        """Whether something takes too long; says so once, and when it is over."""
        hangs = self._clock() > min([*self._late_at.values()], default=math.inf)
        if hangs is not self._hung:
            self._hung = hangs
            logger.warning("%s: %s", self._path, self._news[0] if hangs else self._news[1])
        return hangs


class DriveThreads(Generic[Item]):
    """Threads that do what is queued: one item of each call in turn, so that a call with many of
    them does not keep the others waiting.

    Args:
        name: of the threads.
        count: how many.
        run: what they do with an item.
    """

    def __init__(self, name: str, count: int, run: Callable[[Item], None]) -> None:
        self._run = run
        self._queue: deque[Iterator[Item]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, items: Sequence[Item]) -> None:
        """Queue these, to be begun in their order; in constant time, however many there are."""
        with self._changed:
            self._queue.append(iter(items))
            self._changed.notify(len(items))

    def take_back(self) -> list[Item]:
        """All that was queued and not begun; it is the caller's to end."""
        with self._changed:
            queue, self._queue = self._queue, deque()
        return [item for items in queue for item in items]

    def close(self) -> None:
        """End the threads once nothing is queued. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, until: float) -> bool:
        """Wait for their end; False if it did not come by then, a time of ``time.monotonic``."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._run(item)
            except Exception:  # thread top: what is behind it is others'
                logger.exception("%s failed", threading.current_thread().name)

    def _next(self) -> Item | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return None
                items = self._queue.popleft()
                for item in items:
                    self._queue.append(items)
                    return item


class Drive:
    """A directory with its threads.

    Args:
        directory: on the drive; opened and closed with it.
        config: of the tier.
        number: among the tier's.
        clock: seconds.
        write: writes a chunk; top of a writing thread.
        scan: takes what ``scanned`` finds, on the scanning thread.
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
            config.patience_s,
            clock,
            (
                "a read does not end; chunks there are left alone until it does",
                "reads end again",
            ),
        )
        self.writing = HangWatch(
            path,
            config.write_patience_s,
            clock,
            (
                "a write does not end; nothing is written there until it does, what is there is "
                "read",
                "writes end again",
            ),
        )
        self.readers = DriveThreads(f"ssd-read-{number}", config.read_threads, self._read)
        self.writers = DriveThreads(f"ssd-write-{number}", config.write_threads, write)
        self.num_queued_writes = 0
        self.keys_of_use: dict[bytes, dict[bytes, None]] = {}
        self.collecting = threading.Lock()
        self.is_scanned = False
        """Whether all that is there is known: nothing is written before."""
        self.is_stopping = False

    def start(self) -> Future[None]:
        """Open the directory and scan it, in the background. Once.

        Returns:
            Ends when all is known; has what ``SsdDirectory.open`` raises.
        """
        self._scanner.start()
        return self._known

    def scanned(self) -> Iterator[ScannedRecord]:
        """``SsdDirectory.scan``, watched, until the drive is stopped."""
        records = self.directory.scan()
        while not self.is_stopping:
            with self.reading.watched(PAGE):
                found = next(records, None)
            if found is None or self.is_stopping:
                return
            yield found

    def hangs(self) -> bool:
        """Whether nothing more is to be written: who writes reads, too, to collect a segment."""
        return self.writing.hangs() or self.reading.hangs()

    def append(self, nbytes: int) -> RecordLocation | None:
        """``SsdDirectory.append``, watched."""
        segment_bytes = self.directory.config.segment_bytes
        with self.writing.watched(segment_bytes):
            return self.directory.append(nbytes, self.writing.limit_s(segment_bytes))

    def write(self, location: RecordLocation, page: memoryview, payload: memoryview) -> None:
        """``SsdDirectory.write``, watched."""
        with self.writing.watched(len(page) + len(payload)):
            self.directory.write(location, page, payload)

    def wants_collection(self, wait_s: float) -> Segment | None:
        """``SsdDirectory.wants_collection``, watched."""
        with self.writing.watched(self.directory.config.segment_bytes):
            return self.directory.wants_collection(wait_s)

    def stop(self) -> None:
        """Begin nothing more; what is queued is dropped."""
        self.is_stopping = True
        for threads in (self.readers, self.writers):
            threads.take_back()
            threads.close()

    def close(self, until: float) -> None:
        """Let what runs end, and give the directory to others; a drive that does not end it by
        then, a time of ``time.monotonic``, keeps both as long as this process lives."""
        self.stop()
        if self._scanner.ident is not None:  # it was started
            self._scanner.join(max(0.0, until - time.monotonic()))
        joined = [self.readers.join(until), self.writers.join(until)]
        if all(joined) and not self._scanner.is_alive():
            self.directory.close()
        else:
            logger.warning(
                "%s: the drive hangs; its files stay open, and the directory in use, until this "
                "process ends",
                self.directory.config.path,
            )

    def _open_and_scan(self) -> None:
        """Top of the scanning thread."""
        try:
            with self.reading.watched(PAGE):
                self.directory.open()
            self._scan(self)
            self.is_scanned = not self.is_stopping
        except Exception as exc:  # noqa: BLE001  # thread top: who started it has it
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
    """Start them at once, and wait so long until all is known that they have.

    Raises:
        KVConfigError: a directory can't be used, and that was known in time; else the log has it.
    """
    known = [drive.start() for drive in drives]
    wait(known, wait_s)
    for drive, future in zip(drives, known, strict=True):
        if future.done():
            future.result()
        else:
            path = drive.directory.config.path
            logger.info("%s: what is there is found in the background", path)
            future.add_done_callback(partial(_log_failure, path))


def _log_failure(path: Path, known: Future[None]) -> None:
    if (error := known.exception()) is not None:
        logger.warning("%s: nothing is written there: %s", path, error, exc_info=error)
