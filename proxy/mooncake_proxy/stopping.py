"""When to stop, and whether at once."""

from __future__ import annotations

import asyncio

# Signals so close together are one stop: terminals and service managers reach several processes,
# and the workers' parent passes on what it got.
SAME_STOP_S = 1.0


class Stop:
    """What SIGINT and SIGTERM have asked for. The first one ends what runs in good order, a second
    one at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.is_hurried = False
        self._asked_at = 0.0

    def signal(self, now: float) -> None:
        """One came at `now`, in seconds of the loop's clock."""
        if not self.asked.is_set():
            self.asked.set()
            self._asked_at = now
        elif now - self._asked_at > SAME_STOP_S:
            self.is_hurried = True
