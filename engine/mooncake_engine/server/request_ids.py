"""Names of requests: the client's, the API's and the engine's."""

from __future__ import annotations

import itertools
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


class LiveRequests:
    """Which of the engine's requests serve which of the clients'.

    The engine's ids are minted here. They begin with the client's id, for the logs, and end with
    an attempt number, because clients and proxies repeat an id when they try again, perhaps while
    the engine still holds KV under the first attempt's name.
    """

    def __init__(self) -> None:
        self._attempts = itertools.count(1)
        self._live: dict[str, set[str]] = {}

    def mint(self, request_id: str, num_choices: int) -> list[str]:
        """One engine id per choice."""
        name = f"{request_id}-{next(self._attempts)}"
        return [name] if num_choices == 1 else [f"{name}-{i}" for i in range(num_choices)]

    @contextmanager
    def tracking(self, request_id: str, engine_ids: list[str]) -> Iterator[None]:
        """While the client waits, ``find`` knows its engine ids."""
        live = self._live.setdefault(request_id, set())
        live.update(engine_ids)
        try:
            yield
        finally:
            live.difference_update(engine_ids)
            if not live:
                self._live.pop(request_id, None)

    def find(self, request_id: str) -> set[str]:
        """Every engine id that a client's or engine's id stands for, itself included."""
        return {request_id} | self._live.get(request_id, set())
