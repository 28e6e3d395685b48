"""The thread on which a connector does its I/O, and which never dies in silence."""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from mooncake_kv.errors import ConnectorDead, Fatal

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class Spawn(Protocol):
    """Runs a coroutine as a task of the connector's loop; see ``IoLoop.spawn``."""

    def __call__(
        self, coroutine: Coroutine[Any, Any, None], request_id: str | None = None
    ) -> asyncio.Task[None]:
        """Start it."""


class IoLoop:
    """An asyncio loop in a thread of its own.

    Args:
        name: of the thread.
        on_error: takes the request in which something was raised that nobody thought of, and what.
            Loop thread.
        on_failure: takes what ends the owner.
    """

    def __init__(
        self,
        name: str,
        on_error: Callable[[str, Exception], None],
        on_failure: Callable[[ConnectorDead], None],
    ) -> None:
        self._on_error = on_error
        self._on_failure = on_failure
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, request_id: str, function: Callable[..., None], *args: Any) -> None:
        """Call a function on the loop, soon; calls keep their order. Any thread.

        Args:
            request_id: what fails if the function does.
        """
        self._loop.call_soon_threadsafe(self._guarded, request_id, function, args)

    def spawn(
        self, coroutine: Coroutine[Any, Any, None], request_id: str | None = None
    ) -> asyncio.Task[None]:
        """Run a coroutine as a task of the loop. Only from the loop's own thread.

        Args:
            request_id: what fails if the task does; None if that harms nobody who does not notice.
        """
        return self._start(coroutine, lambda exc: self._fail(request_id, exc))

    def spawn_housekeeping(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run what must not end before the loop does. Only from the loop's own thread."""
        self._start(
            coroutine,
            lambda exc: self._on_failure(ConnectorDead(Fatal.HOUSEKEEPING_ENDED, exc)),
        )

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """Run a coroutine on the loop and wait for its result. Any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def close(self) -> None:
        """Cancel all tasks and end the thread. Idempotent."""
        self._is_closing = True
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        cause: BaseException | None = None
        try:
            self._loop.run_forever()
        except BaseException as exc:
            cause = exc
            raise
        finally:
            if not self._is_closing:
                self._on_failure(ConnectorDead(Fatal.IO_LOOP_ENDED, cause))
            self._loop.run_until_complete(_cancel_all())
            self._loop.close()

    def _start(
        self, coroutine: Coroutine[Any, Any, None], on_error: Callable[[Exception], None]
    ) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            exc = None if task.cancelled() else task.exception()
            if isinstance(exc, Exception):
                on_error(exc)

        task.add_done_callback(ended)
        return task

    def _guarded(
        self, request_id: str, function: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        try:
            function(*args)
        except Exception as exc:  # noqa: BLE001  # request top: it fails that one
            self._fail(request_id, exc)

    def _fail(self, request_id: str | None, exc: Exception) -> None:
        logger.error(
            "the connector failed in %s",
            f"request {request_id}" if request_id else "a task of no request",
            exc_info=exc,
        )
        if isinstance(exc, ConnectorDead):
            self._on_failure(exc)
            return
        if request_id is None:
            return
        try:
            self._on_error(request_id, exc)
        except Exception as again:  # noqa: BLE001  # it can't even be given up
            self._on_failure(ConnectorDead(Fatal.HOUSEKEEPING_ENDED, again))


async def _cancel_all() -> None:
    """Cancel every other task of the loop, also what tasks have begun, such as connections that are
    being made; each has several chances to end."""
    for _ in range(3):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        ended, _ = await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # seen: the loop is over, and whose task it was has been told


def raise_descriptor_limit() -> None:
    """Take all descriptors that this process may have: every peer costs some, of every rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    with suppress(ValueError, OSError):  # where the kernel allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logger.info("this process may open %d files and connections, up from %d", hard, soft)
