"""Who may send requests, and how many run at once: API keys, and a bounded queue."""

from __future__ import annotations

import asyncio
import hmac
import math
from collections import deque
from hashlib import blake2b

from mooncake_proxy.config import AdmissionConfig
from mooncake_proxy.errors import Overloaded, Unauthorized


def holds_key(headers: dict[bytes, bytes], keys: frozenset[str]) -> bool:
    """Whether the bearer token is one of `keys`."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    given = token.strip()
    # Every key is compared, each in constant time: timing reveals nothing about any of them.
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    return scheme.lower() == b"bearer" and any(matches)


def check_key(headers: dict[bytes, bytes], keys: frozenset[str]) -> None:
    """Unauthorized unless the bearer token is one of `keys`; no keys means open."""
    if keys and not holds_key(headers, keys):
        raise Unauthorized("wrong or missing API key: send Authorization: Bearer KEY")


def tenant_salt(headers: dict[bytes, bytes], own: str | None) -> str:
    """The `cache_salt` of a client: the same for all requests with one API key, and of no use to
    find the key. A salt of the client's `own` divides its cache further."""
    key = headers.get(b"authorization", b"").partition(b" ")[2].strip()
    salt = blake2b(key, digest_size=16, person=b"cache_salt")
    if own:
        salt.update(b"\0" + own.encode("utf-8", "replace"))
    return salt.hexdigest()


class AdmissionQueue:
    """First come, first served. Each admitted request calls `leave` once."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def enter(self) -> bool:
        """Admit at once if there is room; if not, call `queue`."""
        limit = self._config.max_running
        if limit and (self.num_running >= limit or self._waiting):
            return False
        self.num_running += 1
        return True

    def leave(self) -> None:
        """Admit the first request that still waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.num_running -= 1

    async def queue(self) -> None:
        """Wait until admitted. Overloaded when the queue is full or slow; a client that leaves is
        dropped from the queue."""
        config = self._config
        if len(self._waiting) >= config.max_waiting:
            raise Overloaded(
                f"{self.num_running} requests are running and {len(self._waiting)} waiting "
                "(--max-running, --max-waiting): try again later",
                retry_after_s=self._retry_after(),
            )
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(turn)
        timer = loop.call_later(config.max_wait_s, _answer, turn, False)
        try:
            is_admitted = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.leave()
            raise
        finally:
            timer.cancel()
            if turn in self._waiting:
                self._waiting.remove(turn)
        if not is_admitted:
            raise Overloaded(
                f"waited {config.max_wait_s:g} s in the queue (--max-wait)",
                retry_after_s=self._retry_after(),
            )

    def _retry_after(self) -> int:
        return max(1, math.ceil(self._config.max_wait_s / 2))


def _answer(turn: asyncio.Future[bool], is_admitted: bool) -> None:
    if not turn.done():
        turn.set_result(is_admitted)
