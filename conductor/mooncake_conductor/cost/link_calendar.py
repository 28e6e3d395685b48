"""The link calendar: until when each direction of each instance's link is booked for transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Consecutive chunks of a prompt that one instance reads from another.

    Args:
        source: slot of the instance that is read from.
        start: index of the first chunk in the prompt.
        num_chunks: number of chunks.
    """

    source: int
    start: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Booking:
    """A transfer that has booked its sender's and its receiver's link.

    Args:
        source: slot of the sender.
        target: slot of the receiver.
        start: time at which the transfer starts.
        done: time at which it is complete.
    """

    source: int
    target: int
    start: float
    done: float


class LinkCalendar:
    """Bookings of the sending and the receiving side of every instance's link.

    A transfer takes ``setup + bytes / bandwidth`` and starts when both its sender and its receiver
    are free. Transfers on one side are served in the order of their bookings.

    Args:
        bytes_per_s: bandwidth of each instance's link, by slot.
        setup_s: setup time of a transfer, in seconds.
    """

    def __init__(self, bytes_per_s: Seconds, setup_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.setup_s = setup_s
        self.sending_until = np.zeros(len(bytes_per_s))
        self.receiving_until = np.zeros(len(bytes_per_s))

    def book(self, source: int, target: int, num_bytes: float, now: float) -> Booking:
        """Book both ends for a transfer of `num_bytes`; without bytes nothing is booked."""
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
        """Book the links for all fetches of a prompt."""
        return [
            self.book(fetch.source, target, fetch.num_chunks * chunk_bytes, now)
            for fetch in fetches
        ]

    def release(self, booking: Booking, now: float) -> None:
        """Release a booking that is complete or cancelled.

        Later bookings move forward by the time that it had left.
        """
        left = booking.done - max(booking.start, now)
        if left <= 0:
            return
        for until, slot in (
            (self.sending_until, booking.source),
            (self.receiving_until, booking.target),
        ):
            until[slot] = max(until[slot] - left, min(until[slot], now))

    def clear(self, slot: int, now: float) -> None:
        """Clear the bookings of an instance that is gone."""
        self.sending_until[slot] = self.receiving_until[slot] = now
