"""Threads for calls that may block without end, such as I/O on a hung drive or a native client
whose server is gone.

They are daemons: ``concurrent.futures`` would wait for such a call when the process ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class DaemonThreads(Generic[Item]):
    """A thread pool with fair queueing: the threads take one item of each ``add`` call in turn, so
    that a call with many items does not delay the others.

    Args:
        name: prefix of the threads' names.
        count: number of threads.
        run: processes one item.
    """

    def __init__(self, name: str, count: int, run: Callable[[Item], None]) -> None:
        self._run = run
        self._queue: deque[Iterator[Item]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, items: Sequence[Item]) -> None:
        """Queue items, which are started in their order. Takes constant time."""
        with self._changed:
            self._queue.append(iter(items))
            self._changed.notify(len(items))

    def cancel_queued(self) -> list[Item]:
        """Remove and return all items that have not been started."""
        with self._changed:
            queue, self._queue = self._queue, deque()
        return [item for items in queue for item in items]

    def close(self) -> None:
        """Let the threads end once the queue is empty. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, until: float) -> bool:
        """Wait for the threads until a time of ``time.monotonic``; False if some still run."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._run(item)
            except Exception:  # thread top: fails this item only
                logger.exception("%s failed", threading.current_thread().name)

    def _next(self) -> Item | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return None
                items = self._queue.popleft()
                for item in items:
                    self._queue.append(items)
                    return item
