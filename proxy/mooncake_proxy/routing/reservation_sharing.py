"""Reservations of this proxy process, told to the others that serve the same instances.

Imported only where there is a conductor: it needs numpy.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

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


_encode = msgspec.json.Encoder().encode
_news_decoder = msgspec.json.Decoder(ReservationNews)
_decoder = msgspec.json.Decoder(list[ReservationChange])


class ReservationSharing:
    """Collects what the conductors of all models reserve, to be told with the loop's next turn."""

    def __init__(self, routers: ModelRouters, loop: AbstractEventLoop) -> None:
        self._routers = routers
        self._loop = loop
        self._listeners: list[Callable[[ReservationNews], None]] = []
        self._pending: dict[tuple[str, bool], list[ReservationChange]] = {}
        routers.on_router(self._join)

    def tell(self, send: Callable[[ReservationNews], None]) -> None:
        """One more that takes messages for others."""
        self._listeners.append(send)

    def take(self, message: Raw) -> None:
        """What another process has sent."""
        self.follow(_news_decoder.decode(message))

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

    def retain(self, owner: str, request_ids: Collection[str]) -> None:
        """Another process has reserved this, and nothing else."""
        for router in self._routers:
            if router.conductor is not None:
                router.conductor.retain(owner, request_ids)

    def forget(self, owner: str) -> None:
        """Another process is gone."""
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
