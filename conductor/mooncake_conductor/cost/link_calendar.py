"""When the links between instances are free: each direction of each is a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Chunks of a prompt that one instance reads from another.

    Args:
        source: slot that is read from.
        start: index of the first chunk in the prompt.
        num_chunks: how many follow each other.
    """

    source: int
    start: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Booking:
    """Both ends of a link, taken for a transfer.

    Args:
        source, target: slots.
        start, done: when it begins and ends.
    """

    source: int
    target: int
    start: float
    done: float


class LinkCalendar:
    """Sending and receiving side of every instance's link.

    A transfer takes ``setup + bytes / bandwidth`` and begins when its sender and its receiver are
    free. One that is booked later never makes another one earlier.

    Args:
        bytes_per_s: bandwidth of each instance's link, by slot.
        setup_s: of a transfer.
    """

    def __init__(self, bytes_per_s: Seconds, setup_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.setup_s = setup_s
        self.sending_until = np.zeros(len(bytes_per_s))
        self.receiving_until = np.zeros(len(bytes_per_s))

    def book(self, source: int, target: int, num_bytes: float, now: float) -> Booking:
        """Take both ends for a transfer, if there is anything to move."""
        if num_bytes <= 0:
            return Booking(source, target, now, now)
        sent, received = self.sending_until[source], self.receiving_until[target]
        start = float(max(now, sent, received))
        slower = float(min(self.bytes_per_s[source], self.bytes_per_s[target]))
        done = start + self.setup_s + num_bytes / slower
        self.sending_until[source] = self.receiving_until[target] = done
        return Booking(source, target, start, done)

    def book_all(
        self, fetches: Sequence[Fetch], target: int, chunk_bytes: float, now: float
    ) -> list[Booking]:
        """Take the links for all of a prompt's fetches."""
        return [
            self.book(fetch.source, target, fetch.num_chunks * chunk_bytes, now)
            for fetch in fetches
        ]

    def give_back(self, booking: Booking, now: float) -> None:
        """A transfer has ended, or will never be: what was booked behind it comes as much sooner as
        it still had to go."""
        left = booking.done - max(booking.start, now)
        if left <= 0:
            return
        for until, slot in (
            (self.sending_until, booking.source),
            (self.receiving_until, booking.target),
        ):
            until[slot] = max(until[slot] - left, min(until[slot], now))

    def cut(self, slot: int, now: float) -> None:
        """An instance is gone: nothing more moves over its link."""
        self.sending_until[slot] = self.receiving_until[slot] = now
