"""A record on its way from an SSD into memory, part by part, its beginning first.

What comes first is what is needed first: chunks lie in the order of layers. Parts are read by
several threads at once, and each is compared with its checksums before anybody is told of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_kv.store.ssd_directory import RecordLocation, SsdDirectory, aligned_buffer
from mooncake_kv.store.ssd_records import (
    PAGE,
    RecordHeader,
    are_sections_right,
    read_page,
    section_bytes,
)
from mooncake_kv.store.ssd_sections import section_checksums


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk that is to be read into memory.

    Args:
        key: of the chunk.
        offset: where its bytes go in memory; they have room for whole pages there.
        is_wanted: whether anybody waits for it yet; asked before each part.
        arrived: told how many of its leading bytes are there, and right, while it is read; by
            several threads, so that a smaller number may come later.
        ended: called once, when nothing of it is read any more: whether all is there, and right.
    """

    key: bytes
    offset: int
    is_wanted: Callable[[], bool]
    arrived: Callable[[int], None]
    ended: Callable[[bool], None]


def read_part(
    directory: SsdDirectory,
    location: RecordLocation,
    header: RecordHeader,
    start: int,
    payload: memoryview,
) -> bool:
    """Read a part of a chunk's bytes from a record that is held; whether they are right. What the
    record's page says is known, and its checksums are what counts: the page is not read again.

    Args:
        directory, location: of the record.
        header: as it was written or found at start.
        start: of the part.
        payload: the part, whole sections.

    Raises:
        StoreIOError: it can't be read.
    """
    section = section_bytes(header.nbytes)
    checksums = directory.read_sections(location, PAGE + start, payload, section)
    return are_sections_right(header, start, checksums)


def read_record(
    directory: SsdDirectory, location: RecordLocation, header: RecordHeader, payload: memoryview
) -> bool:
    """Read all of a record that is held, with its page; whether both are right.

    Raises:
        StoreIOError: it can't be read.
    """
    page = aligned_buffer(PAGE)
    directory.read(location, 0, [page, payload])
    checksums = section_checksums(payload, section_bytes(header.nbytes))
    return read_page(page) == header and are_sections_right(header, 0, checksums)


class RecordRead:
    """The parts of one record that is read. Any thread.

    Args:
        parts: ranges of its bytes, from the beginning.
        read: reads a range into memory; whether it is right.
        is_wanted, arrived: see ``ChunkRead``.
        ended: told once, when nothing of it is read any more: whether all is there, and right, and
            whether a part was wrong. Neither: nobody wanted the rest.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        read: Callable[[int, int], bool],
        is_wanted: Callable[[], bool],
        arrived: Callable[[int], None],
        ended: Callable[[bool, bool], None],
    ) -> None:
        self.parts = parts
        self._read = read
        self._is_wanted = is_wanted
        self._arrived = arrived
        self._ended = ended
        self._are_there = [False] * len(parts)
        self._num_running = 0
        self._has_failed = False
        self._is_given_up = False
        self._lock = threading.Lock()

    def run(self, index: int) -> None:
        """Read a part, unless another one has failed or nobody wants it; once each."""
        with self._lock:
            if self._has_failed or self._is_given_up:  # what ran then has told of the end, or will
                return
            self._num_running += 1
        is_right = is_given_up = False
        try:
            is_given_up = not self._is_wanted()
            is_right = not is_given_up and self._read(*self.parts[index])
        finally:
            self._note(index, is_right, is_given_up)

    def _note(self, index: int, is_right: bool, is_given_up: bool) -> None:
        with self._lock:
            self._are_there[index] = is_right
            self._is_given_up |= is_given_up
            self._has_failed |= not is_right and not is_given_up
            self._num_running -= 1
            num_leading = (*self._are_there, False).index(False)
            are_all_there = all(self._are_there)
            is_last = self._has_failed or self._is_given_up or are_all_there
            has_ended = is_last and not self._num_running
        if has_ended:
            self._ended(are_all_there, self._has_failed)
        elif num_leading > index:  # this part was the first that was missing
            self._arrived(self.parts[num_leading - 1][1])
