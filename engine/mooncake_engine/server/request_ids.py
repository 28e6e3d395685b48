"""Names of requests: the client's, the API's and the engine's; and which requests are live."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

_SANE = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def request_id_from(header: str | None) -> str:
    """The client's ``X-Request-Id`` if it is safe to log and echo, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header
    return uuid.uuid4().hex


def choice_ids(request_id: str, num_choices: int) -> list[str]:
    """What the engine calls each answer; it adds to these to make them unique."""
    if num_choices == 1:
        return [request_id]
    return [f"{request_id}-{index}" for index in range(num_choices)]


class LiveRequests:
    """The requests whose clients wait, by the clients' ids, which may repeat."""

    def __init__(self) -> None:
        self._live: dict[str, set[asyncio.Future[None]]] = {}

    @contextmanager
    def tracking(self, request_id: str) -> Iterator[asyncio.Future[None]]:
        """Inside, the future is done as soon as somebody asks to abort the request."""
        aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._live.setdefault(request_id, set()).add(aborted)
        try:
            yield aborted
        finally:
            self._live[request_id].discard(aborted)
            if not self._live[request_id]:
                del self._live[request_id]

    def abort(self, request_id: str) -> None:
        """Tell every request of that name; unknown names are normal."""
        for aborted in self._live.get(request_id, ()):
            if not aborted.done():
                aborted.set_result(None)
