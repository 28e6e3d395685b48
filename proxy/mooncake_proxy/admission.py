"""How many requests run at once: a bounded queue in front of the flows."""

from __future__ import annotations

import asyncio
import math
from collections import deque

from mooncake_proxy.config import AdmissionConfig
from mooncake_proxy.errors import Overloaded


class Admission:
    """First come, first served. Whoever entered, at once or through the queue, leaves once."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self.num_running = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def enter(self) -> bool:
        """Whether there was room; if not, `queue` waits for it."""
        limit = self._config.max_running
        if limit and (self.num_running >= limit or self._waiting):
            return False
        self.num_running += 1
        return True

    def leave(self) -> None:
        """Give the place to the first one that still waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.num_running -= 1

    async def queue(self) -> None:
        """Wait for a place. Overloaded when the queue is full or slow; a client that goes away
        gives its place up."""
        config = self._config
        if len(self._waiting) >= config.max_waiting:
            raise Overloaded(
                f"{self.num_running} requests run and {len(self._waiting)} wait "
                "(--max-running, --max-waiting): try again later",
                retry_after_s=self._retry_after(),
            )
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(turn)
        # A timer, as this may run without a task, which `timeout` would need.
        timer = loop.call_later(config.max_wait_s, _answer, turn, False)
        try:
            has_place = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self.leave()
            raise
        finally:
            timer.cancel()
            if turn in self._waiting:
                self._waiting.remove(turn)
        if not has_place:
            raise Overloaded(
                f"waited {config.max_wait_s:g} s for a place (--max-wait)",
                retry_after_s=self._retry_after(),
            )

    def _retry_after(self) -> int:
        return max(1, math.ceil(self._config.max_wait_s / 2))


def _answer(turn: asyncio.Future[bool], has_place: bool) -> None:
    if not turn.done():
        turn.set_result(has_place)
