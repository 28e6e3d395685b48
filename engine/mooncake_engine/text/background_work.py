"""Work on texts that takes milliseconds or more: off the event loop, in bounded lines.

What is short is done at once. Longer texts have threads of their own, and the longest ones another,
so that a client's megabytes keep only megabytes waiting; grammars have a third line. None of them
is the default pool of asyncio, which others need. A full line refuses: what waits costs memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from mooncake_engine.errors import Overloaded

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters; longer texts take milliseconds to encode: other requests should not wait for them."""
LONGEST_TEXTS = 500_000
"""Characters from which on a text takes tenths of a second."""
CHARACTERS_PER_TOKEN = 4
"""What decoding a token costs, compared with encoding text."""


class WorkLine:
    """Threads, and how much may wait for them.

    Args:
        what: it is that waits, for the refusal.
        num_threads: that work.
        max_waiting: calls beside those that run.
    """

    def __init__(self, what: str, num_threads: int, max_waiting: int) -> None:
        self._what = what
        self._room = num_threads + max_waiting
        self._num_entered = 0
        self._threads = ThreadPoolExecutor(num_threads, what.replace(" ", "-"))

    async def run(self, work: Callable[[], T]) -> T:
        """Do something there; whoever is cancelled before its turn leaves the line.

        Raises:
            Overloaded: too much waits already.
        """
        if self._num_entered >= self._room:
            raise Overloaded(
                f"too many {self._what} are waiting ({self._room}); try again in a moment"
            )
        self._num_entered += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._leave)
        try:
            return await future
        finally:
            del future  # it holds its error, that this frame, and so the text: until the next gc

    def _leave(self, _: object) -> None:
        self._num_entered -= 1


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """The lines of one server. Threads start with their first work."""

    texts: WorkLine = field(default_factory=lambda: WorkLine("long texts", 2, 256))
    longest: WorkLine = field(default_factory=lambda: WorkLine("very long texts", 1, 16))
    grammars: WorkLine = field(default_factory=lambda: WorkLine("grammars", 1, 32))

    async def on_text(self, num_characters: int, work: Callable[[], T]) -> T:
        """Tokenise, detokenise or lay out a text of that size.

        Raises:
            Overloaded: too many long ones wait already.
        """
        if num_characters <= LONG_TEXT:
            return work()
        line = self.texts if num_characters <= LONGEST_TEXTS else self.longest
        return await line.run(work)
