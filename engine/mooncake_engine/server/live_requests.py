"""Registry of the requests that a server is processing, with their ids, aborts and client
disconnects."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from mooncake_api.instance_protocol import SAFE_REQUEST_ID, UNSAFE_REQUEST_ID
from mooncake_engine.errors import EngineError, InvalidRequest
from mooncake_engine.process.worker_counts import WorkerCounts

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client closed its connection; no response can be sent."""


class RequestAborted(EngineError):
    """The request was aborted through ``/abort``."""


class ShuttingDown(EngineError):
    """The instance rejects new requests, or fails running ones, because it is shutting down."""


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, Result], ending: asyncio.Future[EngineError]
) -> Result:
    """Run ``work`` and return its result; cancel it if the client disconnects first.

    Args:
        receive: the ``receive`` callable of an ASGI connection whose request body has been read.
        ending: resolves when the work has to stop; its result is the reason.

    Raises:
        ClientDisconnected: the client disconnected first. ``work`` was cancelled and has
            finished.
        EngineError: the result of ``ending``, if that resolved first; the same holds for ``work``.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    waited: set[asyncio.Future[Any]] = {working, watching, ending}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ending.result() if ending.done() else ClientDisconnected
    finally:
        await cancel_all(waited)
        waited.clear()
        del working  # breaks a reference cycle: the task holds its error, the error this frame


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have finished; their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_SAFE_REQUEST_ID = re.compile(SAFE_REQUEST_ID)


def request_id_from(header: str | None, in_body: str | None = None) -> str:
    """The client's ``X-Request-Id`` if it is safe to log and echo, else the ``request_id`` of the
    body, else a new one; the order is vLLM's.

    Raises:
        InvalidRequest: the body's would be used, and is not safe to log and echo.
    """
    if header is not None and _SAFE_REQUEST_ID.fullmatch(header):
        return header
    if in_body is None:
        return uuid.uuid4().hex
    if not _SAFE_REQUEST_ID.fullmatch(in_body):
        raise InvalidRequest(UNSAFE_REQUEST_ID, param="request_id")
    return in_body


def choice_ids(request_id: str, num_choices: int) -> list[str]:
    """The engine's request id of each choice. The engine appends a suffix to make them unique."""
    if num_choices == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(num_choices)]


class LiveRequests:
    """The requests that clients are waiting for, by request id. Ids come from clients, so that
    several requests may share one.

    Args:
        counts: publishes the number of live requests to the other API workers; None where this
            process is the only one.
        forward_abort: tells the other API workers to call ``abort_here`` for a request id; None
            where there are none.
    """

    def __init__(
        self,
        counts: WorkerCounts | None = None,
        forward_abort: Callable[[str], None] | None = None,
    ) -> None:
        self._counts = counts or WorkerCounts()
        self._forward_abort = forward_abort
        self._live: dict[str, set[asyncio.Future[EngineError]]] = {}
        self._num_live = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._num_live

    @property
    def num_everywhere(self) -> int:
        """Number of live requests of all API workers."""
        return self._counts.num_waiting

    @contextmanager
    def tracking(self, request_id: str) -> Iterator[asyncio.Future[EngineError]]:
        """Hold a request in the registry. The yielded future resolves when the request has to stop;
        its result is the reason.

        Raises:
            ShuttingDown: the instance rejects new requests.
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
        self._counts.set_num_waiting(self._num_live)

    def abort(self, request_id: str) -> None:
        """Abort every request with this id, on all API workers. An unknown id is not an error."""
        self.abort_here(request_id)
        if self._forward_abort is not None:
            self._forward_abort(request_id)

    def abort_here(self, request_id: str) -> None:
        """Abort the requests with this id on this worker."""
        self._end(self._live.get(request_id, ()), RequestAborted("the request was aborted"))

    def close(self) -> None:
        """Reject new requests from now on."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raises ShuttingDown if the instance rejects new requests."""
        if self._is_closed:
            raise ShuttingDown("the instance is shutting down and accepts no new requests")

    def fail_all(self) -> None:
        """Fail every live request."""
        cause = ShuttingDown("the instance is shutting down and can't finish this request")
        for endings in self._live.values():
            self._end(endings, cause)

    @staticmethod
    def _end(endings: Iterable[asyncio.Future[EngineError]], cause: EngineError) -> None:
        for ending in endings:
            if not ending.done():
                ending.set_result(cause)
