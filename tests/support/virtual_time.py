"""An asyncio loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

SETTLE_S = 0.002
"""Grace period for a busy kernel; normally, data written to a socket of this process is readable at
once."""


class _VirtualSelector(selectors.SelectSelector):
    """Returns sockets' events; if there are none, advances the clock to the next timer.

    Args:
        has_sockets: whether bytes may be in flight between sockets of this process.
    """

    def __init__(self, *, has_sockets: bool) -> None:
        super().__init__()
        self.now = 0.0
        self._settle_s = SETTLE_S if has_sockets else 0.0
        # The deadline of the loop's next timer.
        self.next_timer: Callable[[], float | None] = lambda: None

    def select(self, timeout: float | None = None) -> Any:
        """The ready events; if there are none, advances the clock.

        Raises:
            RuntimeError: there is no event to wait for.
        """
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._settle_s and (ready := super().select(self._settle_s)):
            return ready
        due = self.next_timer()
        if timeout is None or due is None:
            raise RuntimeError("deadlock: no event is ready, and no timer is set")
        self.now = max(self.now, due)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Hours pass in milliseconds, in the same order; timers fire exactly on time."""

    def __init__(self, *, has_sockets: bool = False) -> None:
        self._virtual_selector = _VirtualSelector(has_sockets=has_sockets)
        super().__init__(self._virtual_selector)
        self._virtual_selector.next_timer = self._next_timer

    def time(self) -> float:
        return self._virtual_selector.now

    def _next_timer(self) -> float | None:
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]  # asyncio's heap
        return timers[0].when() if timers else None


def run_virtually(coroutine: Coroutine[Any, Any, None], *, has_sockets: bool = False) -> None:
    """Run a coroutine to completion in virtual time; cancels the tasks that it leaves running.

    Args:
        coroutine: to run.
        has_sockets: whether it communicates with itself through sockets; the clock then stands
            still while bytes are in flight.
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
    """Keeps the tasks that a protocol under test spawns, so that no failure goes unnoticed."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def spawn(
        self, coroutine: Coroutine[Any, Any, None], request_id: str | None = None
    ) -> asyncio.Task[None]:
        """As ``ConnectorContext.spawn``."""
        self._tasks.append(asyncio.ensure_future(coroutine))
        return self._tasks[-1]

    def check(self) -> None:
        """Re-raise the error of a failed task."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
