"""An asyncio loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

SETTLE_S = 0.002
"""What is written to a socket of this process is readable at once; this is for a busy kernel."""


class _ImpatientSelector(selectors.SelectSelector):
    """Hands out what sockets have, and only if that is nothing moves a clock to the next timer.

    Args:
        has_sockets: bytes may still be on their way between sockets of this process.
    """

    def __init__(self, *, has_sockets: bool) -> None:
        super().__init__()
        self.now = 0.0
        self._settle_s = SETTLE_S if has_sockets else 0.0
        # When the loop's next timer is due.
        self.next_timer: Callable[[], float | None] = lambda: None

    def select(self, timeout: float | None = None) -> Any:
        """What is ready; the clock has moved if nothing was.

        Raises:
            RuntimeError: nothing will ever happen.
        """
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._settle_s and (ready := super().select(self._settle_s)):
            return ready
        due = self.next_timer()
        if timeout is None or due is None:
            raise RuntimeError("every task waits for another: a deadlock")
        self.now = max(self.now, due)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Hours pass in milliseconds, in the same order; timers are on time to the last bit."""

    def __init__(self, *, has_sockets: bool = False) -> None:
        self._impatient = _ImpatientSelector(has_sockets=has_sockets)
        super().__init__(self._impatient)
        self._impatient.next_timer = self._next_timer

    def time(self) -> float:
        return self._impatient.now

    def _next_timer(self) -> float | None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # asyncio's heap
        return timers[0].when() if timers else None


def run_virtually(coroutine: Coroutine[Any, Any, None], *, has_sockets: bool = False) -> None:
    """Run a coroutine to its end in virtual time; what it left running is cancelled.

    Args:
        coroutine: what to run.
        has_sockets: it talks to itself through sockets: the clock stands while bytes are on their
            way.
    """
    loop = VirtualLoop(has_sockets=has_sockets)
    try:
        loop.run_until_complete(coroutine)
        loop.run_until_complete(_cancel_others())
    finally:
        loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class SpawnedTasks:
    """What a protocol spawns while it is tested: kept, so that none dies unseen."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def spawn(
        self, coroutine: Coroutine[Any, Any, None], request_id: str | None = None
    ) -> asyncio.Task[None]:
        """As ``ConnectorContext.spawn``."""
        self._tasks.append(asyncio.ensure_future(coroutine))
        return self._tasks[-1]

    def check(self) -> None:
        """None has died."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
