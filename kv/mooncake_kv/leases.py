"""Leases and reservations: which blocks are held for a peer, until when, and how each hold ended.
Pure: the clock is an argument.

``LeaseTable``: finished prompts that a decode instance pulls. A lease ends when the decode instance
releases it, when we end it, or when it times out. We can't stop a one-sided read. Timing out is
safe only because the reader asks, after the read, whether the lease was valid the whole time; the
reply to a repeated question stays the same.

``ReservationTable``: blocks that a prefill instance may write. A reservation is granted to one
writer. Before that it can be revoked immediately. Afterwards its blocks are not free until the
writer has reported that it is drained, or is known to be dead. If a writer falls silent, the
request stops waiting, but the blocks stay reserved. Any message may arrive early, late, twice or
from an unknown peer; the reply to a repeated one stays the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from mooncake_kv.protocol import LeaseStatus, Writer

NO_READER = ""
MAX_ENDINGS = 65_536
"""Ended leases, and ended reservations, whose outcome is kept to answer repeated messages."""


class LeaseTable:
    """Leases by request id. Pure: the clock is an argument.

    Args:
        duration_s: how long a lease lasts without a renewal, in seconds.
    """

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self._deadlines: OrderedDict[str, float] = OrderedDict()  # soonest first
        self._endings: OrderedDict[str, tuple[LeaseStatus, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deadlines)

    def grant(self, request_id: str, now: float) -> None:
        """Start a lease."""
        self._deadlines[request_id] = now + self.duration_s

    def renew(self, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Extend leases; returns those that are not held."""
        lost = []
        for request_id in request_ids:
            if request_id in self._deadlines:
                self._deadlines[request_id] = now + self.duration_s
                self._deadlines.move_to_end(request_id)
            else:
                lost.append(request_id)
        return tuple(lost)

    def end(self, request_id: str, ending: LeaseStatus, reader: str = NO_READER) -> LeaseStatus:
        """End a lease before its deadline; returns how it ended, now or earlier.

        A lease that one reader released is EXPIRED for every other reader, which may have read
        after the release.
        """
        if self._deadlines.pop(request_id, None) is not None:
            self._remember(request_id, ending, reader)
            return ending
        status, by = self._endings.get(request_id, (LeaseStatus.UNKNOWN, NO_READER))
        return LeaseStatus.EXPIRED if status is LeaseStatus.RELEASED and by != reader else status

    def is_held(self, request_id: str) -> bool:
        """Whether the lease is current."""
        return request_id in self._deadlines

    def expire(self, now: float) -> list[str]:
        """End the leases whose deadline has passed; returns their request ids."""
        expired = []
        while self._deadlines:
            request_id, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                break
            self.end(request_id, LeaseStatus.EXPIRED)
            expired.append(request_id)
        return expired

    def _remember(self, request_id: str, ending: LeaseStatus, reader: str) -> None:
        self._endings[request_id] = ending, reader
        if len(self._endings) > MAX_ENDINGS:
            self._endings.popitem(last=False)


class ReservationState(Enum):
    """State of a reservation."""

    OFFERED = auto()
    """Posted to the metaserver; no writer yet."""
    GRANTED = auto()
    """Granted to a writer, which is expected to report how it ended."""
    REVOKED = auto()
    """Revoked by us; the writer may not have stopped yet."""


@dataclass(slots=True)
class Reservation:
    """The reserved blocks of one request.

    Args:
        request_id: our name for the request.
        tokens: half-open range of the prompt's tokens whose KV is to be written; ends with the
            prompt.
        deadline: if no message arrives until then, a writer is asked for its status, and a
            reservation without a writer ends.
        last_contact: when the writer last sent a message.
        last_reachable: when the writer, or at least the kernel at its address, last answered.
        state: the state.
        writer: the writer that it was granted to, if any.
        prompt_digest: digest of the prompt whose KV is to be written.
    """

    request_id: str
    tokens: tuple[int, int]
    deadline: float
    last_contact: float
    last_reachable: float
    state: ReservationState = ReservationState.OFFERED
    writer: Writer | None = None
    prompt_digest: str = ""


class ReservationTable:
    """Reservations by request id.

    Args:
        open_s: how long a reservation waits for its writer, in seconds.
        silence_s: how long a writer may be silent before it is overdue, in seconds.
    """

    def __init__(self, open_s: float, silence_s: float) -> None:
        self._open_s = open_s
        self._silence_s = silence_s
        self._held: dict[str, Reservation] = {}
        self._endings: OrderedDict[str, tuple[LeaseStatus, Writer | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, request_id: str) -> Reservation | None:
        """The reservation, if it has not ended."""
        return self._held.get(request_id)

    def reserve(
        self, request_id: str, tokens: tuple[int, int], now: float, prompt_digest: str = ""
    ) -> None:
        """Add a reservation, which is open to the first writer."""
        self._held[request_id] = Reservation(
            request_id, tokens, now + self._open_s, now, now, prompt_digest=prompt_digest
        )

    def open(self, request_id: str, writer: Writer, now: float) -> LeaseStatus:
        """Grant a reservation to a writer: HELD. EXPIRED if another writer has it, or it was
        revoked."""
        held = self._held.get(request_id)
        if held is None:
            return self._endings.get(request_id, (LeaseStatus.UNKNOWN, None))[0]
        if held.state is ReservationState.OFFERED:
            held.state, held.writer = ReservationState.GRANTED, writer
        if held.state is not ReservationState.GRANTED or held.writer != writer:
            return LeaseStatus.EXPIRED
        self._heard(held, now)
        return LeaseStatus.HELD

    def renew(self, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """Process a writer's keepalive; returns the requests that it has to stop writing."""
        lost = []
        for request_id in request_ids:
            held = self._held.get(request_id)
            if held is not None and held.state is not ReservationState.OFFERED:
                self._heard(held, now)
            if held is None or held.state is not ReservationState.GRANTED:
                lost.append(request_id)
        return tuple(lost)

    def end(self, request_id: str, writer: Writer | None, ending: LeaseStatus) -> bool:
        """End a reservation: its writer reports that it is drained, or we know it (``writer`` is
        None). Returns False if the reservation does not exist or has another writer."""
        held = self._held.get(request_id)
        if held is None or (writer is not None and held.writer not in (None, writer)):
            return False
        del self._held[request_id]
        self._endings[request_id] = ending, writer
        if len(self._endings) > MAX_ENDINGS:
            self._endings.popitem(last=False)
        return True

    def ending(self, request_id: str, writer: Writer) -> LeaseStatus:
        """How a reservation ended for that writer."""
        status, by = self._endings.get(request_id, (LeaseStatus.UNKNOWN, None))
        return LeaseStatus.EXPIRED if status is LeaseStatus.RELEASED and by != writer else status

    def revoke(self, request_id: str, now: float) -> bool:
        """Revoke a reservation; returns True if it is free immediately because it had no writer."""
        held = self._held.get(request_id)
        if held is None:
            return False
        if held.state is ReservationState.OFFERED:
            return self.end(request_id, None, LeaseStatus.EXPIRED)
        held.state = ReservationState.REVOKED
        return False

    def overdue(self, now: float) -> list[Reservation]:
        """The reservations whose deadline has passed. Each is returned again after another
        ``silence_s`` without a message."""
        late = [held for held in self._held.values() if held.deadline <= now]
        for held in late:
            held.deadline = now + self._silence_s
        return late

    def _heard(self, held: Reservation, now: float) -> None:
        held.last_contact = held.last_reachable = now
        held.deadline = now + self._silence_s
