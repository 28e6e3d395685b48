"""Reservations of requests: prefill time, link time, predicted chunks and decode capacity.

Every reservation has an owner and a deadline, and ends exactly once: when its request finishes,
fails, is cancelled or refused after the prefill, when it expires, or when its owner or instance is
gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from mooncake_conductor.cost.link_calendar import Booking
from mooncake_conductor.decode_load import DecodeLedger
from mooncake_conductor.fleet import Fleet
from mooncake_conductor.index.chunk_index import ChunkIndex
from mooncake_conductor.index.predictions import Prediction
from mooncake_conductor.policies.situation import PrefillChoice, RoutingRequest, behind_queue

# Deadlines of ended reservations that may be kept beside twice those of live ones.
MAX_ENDED_DEADLINES = 1024


class Stage(Enum):
    """Progress of a request."""

    PREFILLING = auto()
    """Queued or running on its prefill instance."""
    HANDED_OVER = auto()
    """Prefilled; its KV is being transferred."""
    DECODING = auto()


class ReservationEvent(Enum):
    """Changes of a reservation."""

    RESERVED = "reserved"
    PREFILLED = "prefilled"
    REBOUND = "rebound"
    JOINED = "joined"
    FINISHED = "finished"
    ENDED = "ended"


@dataclass(slots=True)
class Reservation:
    """The reservation of one request.

    Args:
        request: the request.
        choice: the choice of its prefill instance.
        decode_slot: slot of its decode instance; may change until it decodes.
        deadline: time at which the reservation expires.
        expected_at: expected end of the prefill.
        stage: progress of the request.
        prediction: chunks that the prefill will leave on its instance.
        transfers: bookings of links: its fetches, later the transfer to the decode instance.
    """

    request: RoutingRequest
    choice: PrefillChoice
    decode_slot: int
    deadline: float
    expected_at: float = 0.0
    stage: Stage = Stage.PREFILLING
    prediction: Prediction | None = None
    transfers: list[Booking] = field(default_factory=list)


OnChange = Callable[[ReservationEvent, Reservation, float], None]


def _ignore(event: ReservationEvent, reservation: Reservation, now: float) -> None:
    """Default of `on_change`: changes are not shared."""


class ReservationBook:
    """All live reservations of a conductor.

    Args:
        fleet: the instances, with their prefill queues and links.
        index: receives the predictions.
        ledger: receives the bindings to decode instances.
        sends_late: KV is transferred after the prefill (pull) instead of during it (push).
    """

    def __init__(
        self, fleet: Fleet, index: ChunkIndex, ledger: DecodeLedger, *, sends_late: bool = False
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._ledger = ledger
        self._sends_late = sends_late
        self._live: dict[str, Reservation] = {}
        self._deadlines: list[tuple[float, str]] = []
        # Called with every change, in order, to share them with other conductors.
        self.on_change: OnChange = _ignore

    def __len__(self) -> int:
        return len(self._live)

    def of_owner(self, owner: str) -> list[Reservation]:
        """All reservations of an owner."""
        return [
            reservation for reservation in self._live.values() if reservation.request.owner == owner
        ]

    def get(self, request_id: str) -> Reservation | None:
        """The live reservation of a request, if any."""
        return self._live.get(request_id)

    def reserve(self, reservation: Reservation, now: float) -> None:
        """Reserve prefill time, links for the fetches and decode capacity, and predict the chunks.

        An existing reservation with the same request id is released first.
        """
        request, choice = reservation.request, reservation.choice
        self.release(request.request_id, now)
        self._live[request.request_id] = reservation
        self._await_deadline(reservation)
        computed = request.num_tokens - choice.num_reused
        queues = self._fleet.queues
        # While a prefill waits for its KV load, its instance prefills nothing else.
        seconds = behind_queue(choice.queue, choice.load, choice.compute, self._fleet.num_layers)
        prefill_s = seconds - choice.queue
        queues.enter(choice.slot, request.request_id, prefill_s, computed, now)
        ready_at, fleet = now + choice.ttft, self._fleet
        reservation.transfers = fleet.links.book_all(
            choice.fetches, choice.slot, fleet.chunk_bytes, now
        )
        reservation.prediction = self._index.predict(
            choice.slot, self._new_chunks(reservation), ready_at, reservation.deadline
        )
        self._bind(reservation, ready_at)
        self.on_change(ReservationEvent.RESERVED, reservation, now)

    def prefilled(self, request_id: str, now: float) -> Reservation | None:
        """Note that the prefill is complete, and release its time.

        Returns:
            The reservation of the request, if any.
        """
        reservation = self._live.get(request_id)
        if reservation is not None and reservation.stage is Stage.PREFILLING:
            self._release_prefill(reservation, now)
            self.on_change(ReservationEvent.PREFILLED, reservation, now)
        return reservation

    def is_prefilling(self, request_id: str) -> bool:
        """Whether the request has a live reservation and its prefill is not complete."""
        reservation = self._live.get(request_id)
        return reservation is not None and reservation.stage is Stage.PREFILLING

    def rebind(self, request_id: str, decode_slot: int, now: float, num_held: int = 0) -> None:
        """Bind a request to a decode instance that holds `num_held` tokens of its prompt already.

        If the prefill is complete, the links are booked for the transfer of its KV.
        """
        reservation = self._live.get(request_id)
        if reservation is not None and reservation.stage is not Stage.DECODING:
            reservation.decode_slot = decode_slot
            self._bind(reservation, now)
            if reservation.stage is Stage.HANDED_OVER:
                self._send(reservation, num_held, now)
            self.on_change(ReservationEvent.REBOUND, reservation, now)

    def joined(self, request_id: str, now: float) -> None:
        """Note that the request decodes."""
        reservation = self.prefilled(request_id, now)
        if reservation is not None:
            reservation.stage = Stage.DECODING
            self._end_transfers(reservation, now)
            self._ledger.join(request_id, now)
            self.on_change(ReservationEvent.JOINED, reservation, now)

    def finished(self, request_id: str, now: float) -> None:
        """End the reservation of a completed request."""
        self._ledger.finish(request_id, now)
        if (reservation := self._live.get(request_id)) is not None:
            self.on_change(ReservationEvent.FINISHED, reservation, now)
        self.release(request_id, now)

    def release(self, request_id: str, now: float) -> bool:
        """End the reservation of a request, if any. Returns whether it had one."""
        reservation = self._live.pop(request_id, None)
        self._ledger.release(request_id)
        if reservation is None:
            return False
        if reservation.stage is Stage.PREFILLING:
            self._release_prefill(reservation, now)
        self._end_transfers(reservation, now)
        self.on_change(ReservationEvent.ENDED, reservation, now)
        return True

    def sweep(self, now: float) -> list[str]:
        """Release expired reservations. Returns their request ids."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heapq.heappop(self._deadlines)
            reservation = self._live.get(request_id)
            if reservation is not None and reservation.deadline == deadline:
                self.release(request_id, now)
                overdue.append(request_id)
        return overdue

    def release_owner(self, owner: str, now: float) -> list[str]:
        """Release all reservations of an owner: a proxy that is gone."""
        return self._release_where(lambda reservation: reservation.request.owner == owner, now)

    def release_slot(self, slot: int, now: float) -> list[str]:
        """Release all reservations that still need an instance: it is gone."""

        def needs(reservation: Reservation) -> bool:
            prefills = reservation.stage is Stage.PREFILLING and reservation.choice.slot == slot
            return prefills or reservation.decode_slot == slot

        for reservation in self._live.values():
            if any(slot in (each.source, each.target) for each in reservation.transfers):
                self._end_transfers(reservation, now)
        return self._release_where(needs, now)

    def uses(self, slot: int) -> bool:
        """Whether an instance has work, or KV that a decode instance has not received yet."""
        return any(
            reservation.decode_slot == slot
            or (reservation.choice.slot == slot and reservation.stage is not Stage.DECODING)
            for reservation in self._live.values()
        )

    def _await_deadline(self, reservation: Reservation) -> None:
        """Note when a reservation expires. The heap also has entries of reservations that ended
        before; it is built anew when most of them are."""
        heapq.heappush(self._deadlines, (reservation.deadline, reservation.request.request_id))
        if len(self._deadlines) > 2 * len(self._live) + MAX_ENDED_DEADLINES:
            self._deadlines = [(each.deadline, name) for name, each in self._live.items()]
            heapq.heapify(self._deadlines)

    def _release_where(self, is_meant: Callable[[Reservation], bool], now: float) -> list[str]:
        ended = [
            request_id for request_id, reservation in self._live.items() if is_meant(reservation)
        ]
        for request_id in ended:
            self.release(request_id, now)
        return ended

    def _release_prefill(self, reservation: Reservation, now: float) -> None:
        """Release what a prefill that is complete, or won't be, has reserved."""
        reservation.stage = Stage.HANDED_OVER
        self._fleet.queues.leave(reservation.choice.slot, reservation.request.request_id, now)
        self._end_transfers(reservation, now)
        if reservation.prediction is not None:
            self._index.retract(reservation.prediction)

    def _send(self, reservation: Reservation, num_held: int, now: float) -> None:
        """Book the transfer of the KV to the decode instance; cancels earlier transfers."""
        self._end_transfers(reservation, now)
        source, fleet = reservation.choice.slot, self._fleet
        if source == reservation.decode_slot:
            return
        begin = now if self._sends_late else now - reservation.choice.compute
        num_bytes = (reservation.request.num_tokens - num_held) * fleet.kv_bytes_per_token
        reservation.transfers = [
            fleet.links.book(source, reservation.decode_slot, num_bytes, begin)
        ]

    def _end_transfers(self, reservation: Reservation, now: float) -> None:
        for booking in reservation.transfers:
            self._fleet.links.release(booking, now)
        reservation.transfers = []

    def _new_chunks(self, reservation: Reservation) -> tuple[int, ...]:
        """Keys of the chunks that the prefill adds to those that its instance holds."""
        choice = reservation.choice
        if choice.fetches and choice.keeps_copy:
            return reservation.request.keys[choice.fetches[0].start :]
        return reservation.request.keys[choice.num_reused // self._fleet.chunk_tokens :]

    def _bind(self, reservation: Reservation, eta: float) -> None:
        request = reservation.request
        tokens = request.num_tokens + int(request.num_output_tokens / 2)
        self._ledger.bind(
            request.request_id, reservation.decode_slot, eta, tokens, request.request_class
        )
