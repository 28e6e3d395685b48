"""Reservations of this proxy process, told to the others that serve the same instances.

A report may be lost: they are numbered, and now and then all that is reserved is told. What a
snapshot does not name has ended, unless a report was lost since it began. Imported only where there
is a conductor: it needs numpy.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from mooncake_conductor.shared_reservations import ReservationChange
from mooncake_proxy.routing.conductor_fleet import OWNER
from mooncake_proxy.routing.router import RequestRouter

if TYPE_CHECKING:
    from mooncake_proxy.routing.model_routers import ModelRouters

# Of one message: with the keys of the longest prompts two of them still fit into a datagram.
MAX_PART_BYTES = 60_000


class ReservationNews(Struct, tag="reservations"):
    """Reservations of one process, for a model's pairs or for its instances that do both."""

    owner: str
    model: str
    is_whole: bool
    # A list of ReservationChange, as JSON.
    changes: Raw


class ReservationReport(Struct):
    """What one process tells, `number` by number. A snapshot may take several reports, with others
    between them; what is in none of them has ended."""

    owner: str
    number: int
    begins_snapshot: bool = False
    is_snapshot: bool = False
    ends_snapshot: bool = False
    news: list[ReservationNews] = []


@dataclass(slots=True)
class HeardReports:
    """What has come of another process's reports."""

    number: int = -1
    # By the snapshot that it is sending, and since that began.
    named: set[str] | None = None

    def take(self, report: ReservationReport, sharing: ReservationSharing) -> bool:
        """Apply one; False for one that is no news."""
        if report.number <= self.number:
            return False
        if report.number != self.number + 1:
            self.named = None  # what was lost may have named more
        self.number = report.number
        if report.begins_snapshot:
            self.named = set()
        for news in report.news:
            if news.owner == report.owner:
                named = sharing.follow(news, is_snapshot=report.is_snapshot)
                if self.named is not None:
                    self.named |= named
        if report.ends_snapshot and self.named is not None:
            sharing.retain(report.owner, self.named)
            self.named = None
        return True


_encode = msgspec.json.Encoder().encode
_report_decoder = msgspec.json.Decoder(ReservationReport)
_decoder = msgspec.json.Decoder(list[ReservationChange])


class ReservationSharing:
    """Collects what the conductors of all models reserve, to be told with the loop's next turn."""

    def __init__(self, routers: ModelRouters, loop: AbstractEventLoop) -> None:
        self._routers = routers
        self._loop = loop
        self._listeners: list[Callable[[ReservationNews], None]] = []
        self._pending: dict[tuple[str, bool], list[ReservationChange]] = {}
        # By owner: the other workers of this proxy.
        self._heard: dict[str, HeardReports] = {}
        routers.on_router(self._join)

    def tell(self, send: Callable[[ReservationNews], None]) -> None:
        """One more that takes messages for others."""
        self._listeners.append(send)

    def report_to(self, send: Callable[[str, bytes], None]) -> WorkerReports:
        """Other workers of this proxy, to whom `send` takes an owner's reports."""
        return WorkerReports(self, send)

    def take(self, message: Raw) -> None:
        """A report of another worker."""
        report = _report_decoder.decode(message)
        self._heard.setdefault(report.owner, HeardReports()).take(report, self)

    def follow(self, news: ReservationNews, *, is_snapshot: bool = False) -> set[str]:
        """What another process has reserved; the requests' ids. Of a model without instances here,
        nothing is kept."""
        changes = _decoder.decode(news.changes)
        for router in self._routers:
            if router.model == news.model and router.conductor is not None:
                router.conductor.follow(news.owner, news.is_whole, changes, is_snapshot=is_snapshot)
        return {change.request_id for change in changes}

    def snapshot(self) -> list[ReservationNews]:
        """All that this process has reserved."""
        return [
            news
            for router in self._routers
            if router.conductor is not None
            for is_whole, changes in router.conductor.snapshot()
            for news in _in_parts(router.model, is_whole, changes)
        ]

    def portions(self) -> Iterator[list[ReservationNews]]:
        """The same, little by little; what was told before a portion is not told after it."""
        for router in self._routers:
            if router.conductor is not None:
                for is_whole, changes in router.conductor.portions():
                    self._flush()
                    yield list(_in_parts(router.model, is_whole, changes))

    def retain(self, owner: str, request_ids: Collection[str]) -> None:
        """Another process has reserved this, and nothing else."""
        for router in self._routers:
            if router.conductor is not None:
                router.conductor.retain(owner, request_ids)

    def forget(self, owner: str) -> None:
        """Another process is gone."""
        self._heard.pop(owner, None)
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
            for news in _in_parts(model, is_whole, changes):
                for send in self._listeners:
                    send(news)


class WorkerReports:
    """What this process reserves, as reports for other workers, each as JSON; sent at once.

    `send_portion` sends a part of a snapshot, of which one after the other is begun: as much as
    the others can read meanwhile."""

    def __init__(self, sharing: ReservationSharing, send: Callable[[str, bytes], None]) -> None:
        self._sharing = sharing
        self._send = send
        self._number = 0
        self._portions: Iterator[list[ReservationNews]] | None = None
        sharing.tell(self._add)

    @property
    def is_telling(self) -> bool:
        """Whether a snapshot has begun and is not over."""
        return self._portions is not None

    def begin_snapshot(self) -> None:
        """Unless the one before still lasts."""
        if not self.is_telling:
            self._portions = self._sharing.portions()
            self._report(begins_snapshot=True)

    def send_portion(self) -> None:
        """Of the snapshot, if one has begun."""
        if self._portions is None:
            return
        portion = next(self._portions, None)
        if portion is None:
            self._portions = None
            self._report(ends_snapshot=True)
            return
        for news in portion:
            self._report(is_snapshot=True, news=[news])

    def _add(self, news: ReservationNews) -> None:
        self._report(news=[news])

    def _report(self, **fields: Any) -> None:
        self._send(OWNER, _encode(ReservationReport(OWNER, self._number, **fields)))
        self._number += 1


def _in_parts(
    model: str, is_whole: bool, changes: Sequence[ReservationChange]
) -> Iterator[ReservationNews]:
    part: list[bytes] = []
    size = 0
    for each in map(_encode, changes):
        if part and size + len(each) > MAX_PART_BYTES:
            yield _news(model, is_whole, part)
            part, size = [], 0
        part.append(each)
        size += len(each)
    if part:
        yield _news(model, is_whole, part)


def _news(model: str, is_whole: bool, part: list[bytes]) -> ReservationNews:
    return ReservationNews(OWNER, model, is_whole, Raw(b"[%b]" % b",".join(part)))
