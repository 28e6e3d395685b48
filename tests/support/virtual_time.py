"""An asyncio loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _ImpatientSelector(selectors.SelectSelector):
    """Passes the time that it should wait on to a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """What is ready now; the clock has moved by ``timeout``.

        Raises:
            RuntimeError: nothing will ever happen.
        """
        if timeout is None:
            raise RuntimeError("every task waits for another: a deadlock")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Hours pass in milliseconds, in the same order."""

    def __init__(self) -> None:
        self._impatient = _ImpatientSelector()
        super().__init__(self._impatient)

    def time(self) -> float:
        return self._impatient.now


def run_virtually(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in virtual time; what it left running is cancelled."""
    loop = VirtualLoop()
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
