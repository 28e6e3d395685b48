"""Requests that are being served: their ids, aborts and client disconnects."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from mooncake_engine.errors import EngineError
from mooncake_engine.process.worker_counts import WorkerCounts

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection; no response can be sent."""


class RequestAborted(EngineError):
    """The request was aborted through ``/abort``."""


class ShuttingDown(EngineError):
    """The instance takes no new requests, or can't wait for the end of those that run."""


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, Result], ending: asyncio.Future[EngineError]
) -> Result:
    """The result of ``work``, which is cancelled if the client goes away first.

    Args:
        receive: of an ASGI connection whose request body has been read.
        ending: done when the work has to end; its result says why.

    Raises:
        ClientGone, or the result of ``ending``: what came first; ``work`` has been cancelled and
            has ended.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    waited: set[asyncio.Future[Any]] = {working, watching, ending}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ending.result() if ending.done() else ClientGone
    finally:
        await cancel_all(waited)
        waited.clear()
        del working  # it holds its error, that this frame


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended; their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_SANE = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def request_id_from(header: str | None) -> str:
    """The client's ``X-Request-Id`` if it is safe to log and echo, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header
    return uuid.uuid4().hex


def choice_ids(request_id: str, num_choices: int) -> list[str]:
    """What the engine calls each choice; it adds to these to make them unique."""
    if num_choices == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(num_choices)]


class LiveRequests:
    """The requests whose clients wait, by the clients' ids, which may repeat.

    Args:
        counts: where it says how many they are.
        tell_others: has the other API workers abort the requests of a name; they call
            ``abort_here``.
    """

    def __init__(
        self,
        counts: WorkerCounts | None = None,
        tell_others: Callable[[str], None] | None = None,
    ) -> None:
        self._counts = counts or WorkerCounts()
        self._tell_others = tell_others
        self._live: dict[str, set[asyncio.Future[EngineError]]] = {}
        self._num_live = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._num_live

    @contextmanager
    def tracking(self, request_id: str) -> Iterator[asyncio.Future[EngineError]]:
        """Inside, the future is done as soon as the request has to end; its result says why.

        Raises:
            ShuttingDown: no new requests are taken.
        """
        self.check_open()
        ending: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._live.setdefault(request_id, set()).add(ending)
        self._count(1)
        try:
            yield ending
        finally:
            self._live[request_id].discard(ending)
            if not self._live[request_id]:
                del self._live[request_id]
            self._count(-1)

    def _count(self, more: int) -> None:
        self._num_live += more
        self._counts.set_waiting(self._num_live)

    def abort(self, request_id: str) -> None:
        """Tell every request of that name; unknown names are normal."""
        self.abort_here(request_id)
        if self._tell_others is not None:
            self._tell_others(request_id)

    def abort_here(self, request_id: str) -> None:
        """Tell those of this worker."""
        self._end(self._live.get(request_id, ()), RequestAborted("the request was aborted"))

    def close(self) -> None:
        """Take no new requests from now on."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raises ShuttingDown if no new requests are taken."""
        if self._is_closed:
            raise ShuttingDown("the instance is shutting down and takes no new requests")

    def cut_off(self) -> None:
        """End every request."""
        cause = ShuttingDown("the instance is shutting down and can't wait for this answer's end")
        for endings in self._live.values():
            self._end(endings, cause)

    @staticmethod
    def _end(endings: Iterable[asyncio.Future[EngineError]], cause: EngineError) -> None:
        for ending in endings:
            if not ending.done():
                ending.set_result(cause)
