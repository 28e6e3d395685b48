"""Runs work on long texts, which takes milliseconds or more, in threads with bounded queues.

Short texts are processed on the event loop. Long texts have their own threads, and the longest
texts another one, so that a client that sends megabytes delays only others that do. Grammars have a
third queue. None of them uses asyncio's default thread pool, which other code needs. A full queue
rejects work, because queued texts cost memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from mooncake_engine.errors import Overloaded

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters beyond which a text is processed in a thread: it takes milliseconds to encode, which
would delay other requests."""
LONGEST_TEXTS = 500_000
"""Characters beyond which a text goes to the thread for very long texts: it takes tenths of a
second."""
CHARACTERS_PER_TOKEN = 4
"""The cost of decoding one token, in characters of text to encode."""


class BoundedExecutor:
    """A thread pool with a bounded queue.

    Args:
        what: the kind of work, for thread names and the error message.
        num_threads: the number of threads.
        max_waiting: the most calls that are queued beside those that run.
    """

    def __init__(self, what: str, num_threads: int, max_waiting: int) -> None:
        self._what = what
        self._capacity = num_threads + max_waiting
        self._num_pending = 0
        self._lock = threading.Lock()  # calls end in their threads
        self._threads = ThreadPoolExecutor(num_threads, what.replace(" ", "-"))

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread. A call that is cancelled before it starts leaves the queue.

        Raises:
            Overloaded: the queue is full.
        """
        if self._num_pending >= self._capacity:
            raise Overloaded(
                f"too many {self._what} are queued ({self._capacity}); try again in a moment"
            )
        held = [work]
        del work  # its text is freed as soon as the call has ended, also if that is by cancellation
        with self._lock:
            self._num_pending += 1
        future = self._threads.submit(lambda: held.pop()())
        future.add_done_callback(partial(self._note_done, held))
        try:
            return await asyncio.wrap_future(future)
        finally:
            # Breaks a reference cycle (future, error, this frame), which would otherwise keep the
            # text in memory until the next garbage collection.
            del future

    def _note_done(self, held: list[Callable[[], Any]], _: object) -> None:
        """Note that a call has ended in its thread, or was cancelled before it began: then the
        pool keeps its place in the queue, but no longer its work."""
        held.clear()
        with self._lock:
            self._num_pending -= 1


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """The thread pools of one server. Threads start when they are first needed."""

    texts: BoundedExecutor = field(default_factory=lambda: BoundedExecutor("long texts", 2, 256))
    longest: BoundedExecutor = field(
        default_factory=lambda: BoundedExecutor("very long texts", 1, 16)
    )
    grammars: BoundedExecutor = field(default_factory=lambda: BoundedExecutor("grammars", 1, 32))

    async def on_text(self, num_characters: int, work: Callable[[], T]) -> T:
        """Run work on a text: on the event loop if the text is short, otherwise in a thread.

        Args:
            num_characters: the length of the text.
            work: tokenises, detokenises or renders the text.

        Raises:
            Overloaded: the text is long, and the queue is full.
        """
        if num_characters <= LONG_TEXT:
            return work()
        executor = self.texts if num_characters <= LONGEST_TEXTS else self.longest
        return await executor.run(work)
