"""Shares reservations between proxy processes that serve the same instances.

Each process publishes its changes in numbered reports, which may get lost, and from time to time a
snapshot of all its reservations. A reservation that a snapshot does not contain has ended, unless a
report was lost since the snapshot began. Imported only if there is a conductor: it needs numpy.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from mooncake_conductor.shared_reservations import ReservationChange
from mooncake_proxy.errors import DECODE_ERRORS
from mooncake_proxy.routing.conductor_fleet import OWNER
from mooncake_proxy.routing.router import RequestRouter

if TYPE_CHECKING:
    from mooncake_proxy.routing.model_routers import ModelRouters

# Bytes of changes per message. Even with the keys of the longest prompts, a datagram has room for
# two messages of this size.
MAX_PART_BYTES = 60_000
# Grows when changes get another meaning. Kinds of changes and fields that are only added need none.
VERSION = 1


class ReservationUpdate(Struct, tag="reservations"):
    """Reservation changes of one process, for one model.

    `is_whole`: they are of instances that serve whole requests, not of the model's pairs.
    """

    owner: str
    model: str
    is_whole: bool
    # A list of ReservationChange, as JSON.
    changes: Raw


class ReservationReport(Struct):
    """One numbered report of a process.

    A snapshot may span several reports, with other reports between them. Reservations in none of
    them have ended.
    """

    owner: str
    number: int
    begins_snapshot: bool = False
    is_snapshot: bool = False
    ends_snapshot: bool = False
    updates: list[ReservationUpdate] = []
    version: int = VERSION


@dataclass(slots=True)
class ReceivedReports:
    """State of the reports received from one other process."""

    number: int = -1
    # Request ids named by the snapshot in progress or by changes since it began; None: no snapshot.
    named: set[str] | None = None
    # Whether a change could not be read: its process runs another release.
    has_unknown: bool = False

    def apply(self, report: ReservationReport, sharing: ReservationSharing) -> bool:
        """Apply a report. Returns False for one that was received before."""
        if report.number <= self.number:
            return False
        if report.number != self.number + 1:
            self.named = None  # the lost report may have named more requests
        self.number = report.number
        if report.begins_snapshot:
            self.named = set()
        for update in report.updates:
            if update.owner == report.owner:
                changes = self._read(update.changes)
                named = sharing.apply(update, changes, is_snapshot=report.is_snapshot)
                if self.named is not None:
                    self.named |= named
        if report.ends_snapshot and self.named is not None:
            sharing.retain(report.owner, self.named)
            self.named = None
        return True

    def _read(self, changes: Raw) -> list[ReservationChange]:
        """The changes that this release knows."""
        try:
            return _decoder.decode(changes)
        except DECODE_ERRORS:
            self.has_unknown = True
            self.named = None  # the others may have named more requests
        known: list[ReservationChange] = []
        with suppress(*DECODE_ERRORS):
            for each in _list_decoder.decode(changes):
                with suppress(*DECODE_ERRORS):
                    known.append(_change_decoder.decode(each))
        return known


_encode = msgspec.json.Encoder().encode
_report_decoder = msgspec.json.Decoder(ReservationReport)
_decoder = msgspec.json.Decoder(list[ReservationChange])
_list_decoder = msgspec.json.Decoder(list[Raw])
_change_decoder: msgspec.json.Decoder[ReservationChange] = msgspec.json.Decoder(ReservationChange)


class ReservationSharing:
    """Collects reservation changes of all models, and publishes them in the loop's next iteration.

    It also applies the changes that other processes publish.
    """

    def __init__(self, routers: ModelRouters, loop: AbstractEventLoop) -> None:
        self._routers = routers
        self._loop = loop
        self._listeners: list[Callable[[ReservationUpdate], None]] = []
        self._pending: dict[tuple[str, bool], list[ReservationChange]] = {}
        # Reports received from the other workers of this proxy, by owner.
        self._received: dict[str, ReceivedReports] = {}
        routers.on_router(self._join)

    def add_listener(self, send: Callable[[ReservationUpdate], None]) -> None:
        """Add a function that sends this process's changes to other processes."""
        self._listeners.append(send)

    def report_to(self, send: Callable[[str, bytes], None]) -> WorkerReports:
        """Start to send reports to the other workers of this proxy with `send(owner, report)`."""
        return WorkerReports(self, send)

    def receive(self, message: Raw) -> None:
        """Receive a report of another worker."""
        report = _report_decoder.decode(message)
        self._received.setdefault(report.owner, ReceivedReports()).apply(report, self)

    def apply(
        self,
        update: ReservationUpdate,
        changes: Sequence[ReservationChange],
        *,
        is_snapshot: bool = False,
    ) -> set[str]:
        """Apply another process's changes. Those of a model without instances here are ignored.

        Returns:
            The ids of the requests that the changes are about.
        """
        for router in self._routers:
            if router.model == update.model and router.conductor is not None:
                router.conductor.apply(
                    update.owner, update.is_whole, changes, is_snapshot=is_snapshot
                )
        return {change.request_id for change in changes}

    def snapshot(self) -> list[ReservationUpdate]:
        """All reservations of this process."""
        return [
            update
            for router in self._routers
            if router.conductor is not None
            for is_whole, changes in router.conductor.snapshot()
            for update in _in_parts(router.model, is_whole, changes)
        ]

    def portions(self) -> Iterator[list[ReservationUpdate]]:
        """Yield the snapshot in portions.

        Pending changes are published before each portion, never after one that includes them.
        """
        for router in self._routers:
            if router.conductor is not None:
                for is_whole, changes in router.conductor.portions():
                    self._flush()
                    yield list(_in_parts(router.model, is_whole, changes))

    def retain(self, owner: str, request_ids: Collection[str]) -> None:
        """Release all reservations of another process except these."""
        for router in self._routers:
            if router.conductor is not None:
                router.conductor.retain(owner, request_ids)

    def forget(self, owner: str) -> None:
        """Release all reservations of another process: it is gone."""
        self._received.pop(owner, None)
        for router in self._routers:
            if router.conductor is not None:
                router.conductor.forget(owner)

    def _join(self, router: RequestRouter) -> None:
        if router.conductor is not None:
            router.conductor.share(partial(self._add, router.model))

    def _add(self, model: str, is_whole: bool, change: ReservationChange) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.setdefault((model, is_whole), []).append(change)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for (model, is_whole), changes in pending.items():
            for update in _in_parts(model, is_whole, changes):
                for send in self._listeners:
                    send(update)


class WorkerReports:
    """Sends this process's changes as JSON reports to the other workers, as they occur.

    Snapshots are sent in portions, one per call of `send_portion`, so that the caller can limit
    them to what the other workers are able to read.
    """

    def __init__(self, sharing: ReservationSharing, send: Callable[[str, bytes], None]) -> None:
        self._sharing = sharing
        self._send = send
        self._number = 0
        self._portions: Iterator[list[ReservationUpdate]] | None = None
        sharing.add_listener(self._add)

    @property
    def is_sending_snapshot(self) -> bool:
        """Whether a snapshot is in progress."""
        return self._portions is not None

    def begin_snapshot(self) -> None:
        """Begin a snapshot, unless one is in progress."""
        if not self.is_sending_snapshot:
            self._portions = self._sharing.portions()
            self._report(begins_snapshot=True)

    def send_portion(self) -> None:
        """Send the next portion of the snapshot in progress, if any."""
        if self._portions is None:
            return
        portion = next(self._portions, None)
        if portion is None:
            self._portions = None
            self._report(ends_snapshot=True)
            return
        for update in portion:
            self._report(is_snapshot=True, updates=[update])

    def _add(self, update: ReservationUpdate) -> None:
        self._report(updates=[update])

    def _report(self, **fields: Any) -> None:
        self._send(OWNER, _encode(ReservationReport(OWNER, self._number, **fields)))
        self._number += 1


def _in_parts(
    model: str, is_whole: bool, changes: Sequence[ReservationChange]
) -> Iterator[ReservationUpdate]:
    part: list[bytes] = []
    size = 0
    for each in map(_encode, changes):
        if part and size + len(each) > MAX_PART_BYTES:
            yield _update(model, is_whole, part)
            part, size = [], 0
        part.append(each)
        size += len(each)
    if part:
        yield _update(model, is_whole, part)


def _update(model: str, is_whole: bool, part: list[bytes]) -> ReservationUpdate:
    return ReservationUpdate(OWNER, model, is_whole, Raw(b"[%b]" % b",".join(part)))
