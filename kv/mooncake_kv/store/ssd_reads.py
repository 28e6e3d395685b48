"""Reads a record from an SSD into memory in parts, its beginning first. Used by ``SsdTier``.

Chunks are stored in the order of layers, so their leading bytes are needed first. Several threads
read parts in parallel, and each part is checked against its checksums before it is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_kv.store.ssd_directory import RecordLocation, SsdDirectory, aligned_buffer
from mooncake_kv.store.ssd_records import (
    PAGE,
    RecordHeader,
    do_checksums_match,
    read_page,
    section_bytes,
)
from mooncake_kv.store.ssd_sections import section_checksums


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A request to read a chunk into memory.

    Args:
        key: the chunk's key.
        offset: where to put its bytes in the arena, padded to whole pages.
        is_wanted: returns whether a user still waits for the chunk; called before each part.
        on_progress: called during the read with the number of leading bytes that have been read and
            verified. Several threads call it, so the numbers may come out of order.
        on_done: called once, when no part is being read any more, with whether the whole chunk was
            read and verified.
    """

    key: bytes
    offset: int
    is_wanted: Callable[[], bool]
    on_progress: Callable[[int], None]
    on_done: Callable[[bool], None]


def read_part(
    directory: SsdDirectory,
    location: RecordLocation,
    header: RecordHeader,
    start: int,
    payload: memoryview,
) -> bool:
    """Read a part of a chunk's bytes from a record that is held; returns whether its checksums
    match. The header page is not read again: the checksums of the known header decide.

    Args:
        directory, location: where the record is.
        header: the record's header, as written or found at start.
        start: offset of the part in the chunk.
        payload: the buffer to fill; whole sections.

    Raises:
        StoreIOError: the part can't be read.
    """
    section = section_bytes(header.nbytes)
    checksums = directory.read_sections(location, PAGE + start, payload, section)
    return do_checksums_match(header, start, checksums)


def read_record(
    directory: SsdDirectory, location: RecordLocation, header: RecordHeader, payload: memoryview
) -> bool:
    """Read a whole record that is held, with its header page; returns whether both are intact.

    Raises:
        StoreIOError: the record can't be read.
    """
    page = aligned_buffer(PAGE)
    directory.read(location, 0, [page, payload])
    checksums = section_checksums(payload, section_bytes(header.nbytes))
    return read_page(page) == header and do_checksums_match(header, 0, checksums)


class RecordRead:
    """The read of one record, in parts that several threads run. Thread-safe.

    Args:
        parts: ranges of the chunk's bytes, in their order.
        read: reads a range into memory and returns whether it is intact.
        is_wanted, on_progress: see ``ChunkRead``.
        on_done: called once, when no part is being read any more, with two flags: whether the whole
            chunk was read and verified, and whether a part failed. Both are False if the read was
            cancelled because ``is_wanted`` returned False.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        read: Callable[[int, int], bool],
        is_wanted: Callable[[], bool],
        on_progress: Callable[[int], None],
        on_done: Callable[[bool, bool], None],
    ) -> None:
        self.parts = parts
        self._read = read
        self._is_wanted = is_wanted
        self._on_progress = on_progress
        self._on_done = on_done
        self._have_arrived = [False] * len(parts)
        self._num_running = 0
        self._has_failed = False
        self._is_cancelled = False
        self._lock = threading.Lock()

    def run(self, index: int) -> None:
        """Read a part, unless another one has failed or the read is cancelled. Must be called once
        for each part."""
        with self._lock:
            if self._has_failed or self._is_cancelled:  # the last running part calls ``on_done``
                return
            self._num_running += 1
        is_intact = is_cancelled = False
        try:
            is_cancelled = not self._is_wanted()
            is_intact = not is_cancelled and self._read(*self.parts[index])
        finally:
            self._note(index, is_intact, is_cancelled)

    def _note(self, index: int, is_intact: bool, is_cancelled: bool) -> None:
        with self._lock:
            self._have_arrived[index] = is_intact
            self._is_cancelled |= is_cancelled
            self._has_failed |= not is_intact and not is_cancelled
            self._num_running -= 1
            num_leading = (*self._have_arrived, False).index(False)
            have_all_arrived = all(self._have_arrived)
            is_last = self._has_failed or self._is_cancelled or have_all_arrived
            has_ended = is_last and not self._num_running
        if has_ended:
            self._on_done(have_all_arrived, self._has_failed)
        elif num_leading > index:  # this part was the first missing one
            self._on_progress(self.parts[num_leading - 1][1])
