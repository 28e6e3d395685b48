"""Shares reservations between several conductors on the same fleet.

Messages identify instances by name, because each conductor numbers its slots itself, and contain
relative times, because clocks differ. A remote reservation is applied as if it had been made here;
it ends with its deadline, or when its owner is gone.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from mooncake_conductor.policies.situation import Plan, PrefillChoice, RoutingRequest
from mooncake_conductor.reservations import (
    Reservation,
    ReservationBook,
    ReservationEvent,
    Stage,
)

# Bounds of a portion of a snapshot: requests, and keys of all their chunks. As JSON a portion is
# less than 150 kB, even with long prompts.
PORTION = 64
PORTION_KEYS = 4096


class Reserved(Struct, tag="reserved", frozen=True):
    """A request was placed.

    Args:
        request_id: unique among all conductors.
        prefill: name of its prefill instance.
        decode: name of its decode instance.
        num_tokens: tokens of its prompt.
        num_reused: tokens that are not computed again.
        num_output: expected output tokens.
        request_class: class of the request.
        keys: keys of its prompt's chunks, 8 bytes each.
        ttft: as in ``PrefillChoice``, in seconds, like the next three.
        queue: seconds in the prefill queue.
        load: seconds to load the reused prefix.
        compute: seconds of computation.
        lifetime_s: seconds until its deadline.
    """

    request_id: str
    prefill: str
    decode: str
    num_tokens: int
    num_reused: int
    num_output: float
    request_class: str
    keys: bytes
    ttft: float
    queue: float
    load: float
    compute: float
    lifetime_s: float


class Moved(Struct, tag="moved", frozen=True):
    """A placed request has progressed or ended. ``decode`` names its decode instance."""

    request_id: str
    event: ReservationEvent
    decode: str = ""


ReservationChange = Reserved | Moved
Publish = Callable[[ReservationChange], None]


class ReservationExchange:
    """One conductor's end of the exchange.

    Args:
        book: reservations of the conductor.
        owner: owner of the reservations that this conductor makes.
        names: names of its slots.
        slot_of: returns the slot of an instance; None if it is unknown here.
    """

    def __init__(
        self,
        book: ReservationBook,
        owner: str,
        names: Mapping[int, str],
        slot_of: Callable[[str], int | None],
    ) -> None:
        self._book = book
        self._owner = owner
        self._names = names
        self._slot_of = slot_of
        self._publish: Publish | None = None
        book.on_change = self._publish_change

    def start(self, publish: Publish) -> None:
        """Publish every change from now on."""
        self._publish = publish

    def snapshot(self, now: float) -> list[ReservationChange]:
        """All reservations of this conductor, with their progress."""
        return [change for portion in self.portions(lambda: now) for change in portion]

    def portions(self, now: Callable[[], float]) -> Iterator[list[ReservationChange]]:
        """Yield the snapshot in portions; each is up to date when it is yielded."""
        changes: list[ReservationChange] = []
        num_requests = num_keys = 0
        for reservation in self._book.of_owner(self._owner):
            if self._book.get(reservation.request.request_id) is not reservation:
                continue
            changes += self._changes_of(reservation, now())
            num_requests += 1
            num_keys += len(reservation.request.keys)
            if num_requests >= PORTION or num_keys >= PORTION_KEYS:
                yield changes
                changes, num_requests, num_keys = [], 0, 0
        if changes:
            yield changes

    def _changes_of(self, reservation: Reservation, now: float) -> list[ReservationChange]:
        changes: list[ReservationChange] = [self._reserved(reservation, now)]
        if reservation.stage is not Stage.PREFILLING:
            is_decoding = reservation.stage is Stage.DECODING
            event = ReservationEvent.JOINED if is_decoding else ReservationEvent.PREFILLED
            changes.append(self._moved(event, reservation))
        return changes

    def apply(
        self,
        owner: str,
        changes: Iterable[ReservationChange],
        now: float,
        *,
        is_snapshot: bool = False,
    ) -> list[tuple[Reservation, ReservationEvent]]:
        """Apply changes that another conductor has published.

        Args:
            owner: owner of the reservations.
            changes: the changes, in order.
            now: current time.
            is_snapshot: the changes are part of a snapshot. Known reservations are skipped then;
                one that is known to be on other instances is placed again, as an update was lost.

        Returns:
            The existing reservations that have progressed, for callers that estimate which chunks
            instances hold.
        """
        applied = []
        for change in changes:
            reservation = self._book.get(change.request_id)
            if reservation is not None and reservation.request.owner != owner:
                continue
            if isinstance(change, Reserved):
                if reservation is None or not (
                    is_snapshot and self._is_placed_at(reservation, change)
                ):
                    self._reserve(owner, change, now)
            elif reservation is not None and not (
                is_snapshot and _has_reached(reservation, change.event)
            ):
                applied.append((reservation, change.event))
                self._move(change, now)
        return applied

    def retain(self, owner: str, request_ids: Collection[str], now: float) -> None:
        """Release all reservations of another conductor except these."""
        for reservation in self._book.of_owner(owner):
            if reservation.request.request_id not in request_ids:
                self._book.release(reservation.request.request_id, now)

    def _publish_change(
        self, event: ReservationEvent, reservation: Reservation, now: float
    ) -> None:
        if self._publish is None or reservation.request.owner != self._owner:
            return
        is_new = event is ReservationEvent.RESERVED
        self._publish(
            self._reserved(reservation, now) if is_new else self._moved(event, reservation)
        )

    def _moved(self, event: ReservationEvent, reservation: Reservation) -> Moved:
        return Moved(
            reservation.request.request_id, event, self._names.get(reservation.decode_slot, "")
        )

    def _reserved(self, reservation: Reservation, now: float) -> Reserved:
        request, choice = reservation.request, reservation.choice
        return Reserved(
            request.request_id,
            self._names.get(choice.slot, ""),
            self._names.get(reservation.decode_slot, ""),
            request.num_tokens,
            choice.num_reused,
            request.num_output_tokens,
            request.request_class,
            array("Q", request.keys).tobytes(),
            choice.ttft,
            choice.queue,
            choice.load,
            choice.compute,
            reservation.deadline - now,
        )

    def _reserve(self, owner: str, reserved: Reserved, now: float) -> None:
        prefill, decode = self._slot_of(reserved.prefill), self._slot_of(reserved.decode)
        if prefill is None or decode is None or len(reserved.keys) % 8:
            return
        keys = array("Q")
        keys.frombytes(reserved.keys)
        request = RoutingRequest(
            reserved.request_id,
            reserved.num_tokens,
            tuple(keys),
            reserved.num_output,
            reserved.request_class,
            owner,
        )
        choice = PrefillChoice(
            prefill,
            Plan.LOCAL if reserved.num_reused else Plan.RECOMPUTE,
            reserved.num_reused,
            reserved.ttft,
            reserved.queue,
            reserved.load,
            reserved.compute,
        )
        reservation = Reservation(
            request, choice, decode, now + reserved.lifetime_s, now + reserved.ttft
        )
        self._book.reserve(reservation, now)

    def _is_placed_at(self, reservation: Reservation, reserved: Reserved) -> bool:
        slots = self._slot_of(reserved.prefill), self._slot_of(reserved.decode)
        return slots == (reservation.choice.slot, reservation.decode_slot)

    def _move(self, change: Moved, now: float) -> None:
        book, request_id = self._book, change.request_id
        if change.event is ReservationEvent.PREFILLED:
            book.prefilled(request_id, now)
        elif change.event is ReservationEvent.REBOUND:
            if (slot := self._slot_of(change.decode)) is not None:
                book.rebind(request_id, slot, now)
        elif change.event is ReservationEvent.JOINED:
            book.joined(request_id, now)
        elif change.event is ReservationEvent.FINISHED:
            book.finished(request_id, now)
        else:
            book.release(request_id, now)


def _has_reached(reservation: Reservation, event: ReservationEvent) -> bool:
    """Whether a reservation has already progressed to the event of a snapshot, or further."""
    if event is ReservationEvent.JOINED:
        return reservation.stage is Stage.DECODING
    return reservation.stage is not Stage.PREFILLING
