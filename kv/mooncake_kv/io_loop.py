"""The thread on which a connector does its I/O, and which never dies in silence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Runs a coroutine as a task of the connector's loop."""

CLOSE_TIMEOUT_S = 5.0


class IoLoop:
    """An asyncio loop in a thread of its own.

    Args:
        name: of the thread.
        on_failure: takes the first exception that a task lets out, which ends the owner.
    """

    def __init__(self, name: str, on_failure: Callable[[BaseException], None]) -> None:
        self._on_failure = on_failure
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the loop, soon; calls keep their order. Any thread."""
        self._loop.call_soon_threadsafe(self._guarded, function, args)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task of the loop. Only from the loop's own thread."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """Run a coroutine on the loop and wait for its result. Any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def close(self) -> None:
        """Cancel all tasks and end the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        finally:
            self._loop.close()

    def _guarded(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except Exception as exc:  # noqa: BLE001  # top of a thread: it ends the owner
            self._on_failure(exc)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._on_failure(exc)
