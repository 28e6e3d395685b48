"""Which blocks are reserved for a peer's writes, who may write them, and how each of them ended.

A reservation is granted to one writer. Until then it can be taken back at once. From then on its
blocks are not free before the writer has said that it is drained, or is known to be dead: silence
alone ends the wait, not the reservation. All messages may come early, late, twice or from
strangers; the answer to a repeated one stays the same. Pure: the clock is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from mooncake_engine.kv_transfer.protocol import LeaseStatus, Writer

REMEMBERED_ENDINGS = 65_536

Written = tuple[tuple[int, int, int], ...]


class Stage(Enum):
    """Where a reservation stands."""

    OFFERED = auto()
    """Told to the metaserver; nobody writes."""
    GRANTED = auto()
    """A writer was let in, and is expected to say how it ended."""
    REVOKED = auto()
    """We want it back; the writer may not have stopped yet."""


@dataclass(slots=True)
class Reservation:
    """Blocks of one request.

    Args:
        request_id: ours.
        num_tokens: how many tokens' KV has to come.
        deadline: without a word until then, the peer is looked for or given up.
        last_heard: when the writer last said something.
    """

    request_id: str
    num_tokens: int
    deadline: float
    last_heard: float
    stage: Stage = Stage.OFFERED
    writer: Writer | None = None


class ReservationTable:
    """Reservations by request id.

    Args:
        open_s: how long nobody may come.
        silence_s: how long a writer may say nothing.
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

    def reserve(self, request_id: str, num_tokens: int, now: float) -> None:
        """Blocks are ready for whoever comes."""
        self._held[request_id] = Reservation(request_id, num_tokens, now + self._open_s, now)

    def open(self, request_id: str, writer: Writer, now: float) -> LeaseStatus:
        """Let a writer in: HELD; a second one is not: EXPIRED."""
        held = self._held.get(request_id)
        if held is None:
            return self._endings.get(request_id, (LeaseStatus.UNKNOWN, None))[0]
        if held.stage is Stage.OFFERED:
            held.stage, held.writer = Stage.GRANTED, writer
        if held.stage is not Stage.GRANTED or held.writer != writer:
            return LeaseStatus.EXPIRED
        self._heard(held, now)
        return LeaseStatus.HELD

    def renew(self, request_ids: Iterable[str], now: float) -> tuple[str, ...]:
        """A writer is alive; returns those that it should stop."""
        lost = []
        for request_id in request_ids:
            held = self._held.get(request_id)
            if held is not None and held.stage is not Stage.OFFERED:
                self._heard(held, now)
            if held is None or held.stage is not Stage.GRANTED:
                lost.append(request_id)
        return tuple(lost)

    def end(self, request_id: str, writer: Writer | None, ending: LeaseStatus) -> bool:
        """The writer says that it is drained (None: we know); False if that changes nothing."""
        held = self._held.get(request_id)
        if held is None or (writer is not None and held.writer not in (None, writer)):
            return False
        del self._held[request_id]
        self._endings[request_id] = ending, writer
        if len(self._endings) > REMEMBERED_ENDINGS:
            self._endings.popitem(last=False)
        return True

    def ending(self, request_id: str, writer: Writer) -> LeaseStatus:
        """How a reservation ended for that writer."""
        status, by = self._endings.get(request_id, (LeaseStatus.UNKNOWN, None))
        return LeaseStatus.EXPIRED if status is LeaseStatus.RELEASED and by != writer else status

    def revoke(self, request_id: str, now: float) -> bool:
        """Take it back; True if it is free at once, since nobody was let in."""
        held = self._held.get(request_id)
        if held is None:
            return False
        if held.stage is Stage.OFFERED:
            return self.end(request_id, None, LeaseStatus.EXPIRED)
        held.stage = Stage.REVOKED
        return False

    def overdue(self, now: float) -> list[Reservation]:
        """Those whose deadline has passed; each is named again after another silence."""
        late = [held for held in self._held.values() if held.deadline <= now]
        for held in late:
            held.deadline = now + self._silence_s
        return late

    def _heard(self, held: Reservation, now: float) -> None:
        held.last_heard = now
        held.deadline = now + self._silence_s
