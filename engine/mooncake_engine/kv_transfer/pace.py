"""How often signs of life are given: as often as the shortest lease concerned asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from mooncake_engine.timing import timeout

SIGNS_PER_LEASE = 6


class Pace:
    """A pause between signs of life that is cut short when a shorter lease comes. Loop thread only.

    Args:
        interval_s: the longest pause that all leases bear, as of now.
    """

    def __init__(self, interval_s: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._current_s = 0.0
        self._is_shorter = asyncio.Event()

    def quicken(self, interval_s: float) -> None:
        """A lease has come that bears no longer pause than this."""
        if interval_s < self._current_s:
            self._is_shorter.set()

    async def pause(self) -> None:
        """Wait until the next sign is due."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._current_s = self._interval_s()
        while (left_s := began + self._current_s - loop.time()) > 0:
            self._is_shorter.clear()
            with suppress(asyncio.TimeoutError):
                async with timeout(left_s):
                    await self._is_shorter.wait()
            self._current_s = min(self._current_s, self._interval_s())
