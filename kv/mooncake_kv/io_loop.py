"""The asyncio loop on which a connector does its I/O, in a thread whose death is always
reported."""

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
        """Start the task."""


class IoLoop:
    """An asyncio loop in a thread of its own.

    Args:
        name: name of the thread.
        on_error: receives the request in which an unexpected exception was raised, and the
            exception. Loop thread.
        on_failure: receives a failure that ends the owner.
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

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs: neither was it closed, nor has it ended by itself."""
        return self._thread.is_alive()

    def call(self, request_id: str, function: Callable[..., object], *args: Any) -> None:
        """Schedule a function on the loop; calls keep their order. After ``close`` it is dropped.
        Any thread.

        Args:
            request_id: the request that fails if the function raises.
            function: the function.
            args: its arguments.

        Raises:
            RuntimeError: the loop has ended by itself.
        """
        try:
            self._loop.call_soon_threadsafe(self._guarded, request_id, function, args)
        except RuntimeError:
            if not self._is_closing:
                raise

    def spawn(
        self, coroutine: Coroutine[Any, Any, None], request_id: str | None = None
    ) -> asyncio.Task[None]:
        """Run a coroutine as a task of the loop. Only from the loop's own thread.

        Args:
            coroutine: the coroutine.
            request_id: the request that fails if the task does; None if everything that depends on
                the task detects its failure otherwise.
        """
        return self._start(coroutine, lambda exc: self._fail(request_id, exc))

    def spawn_housekeeping(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine whose failure ends the owner. Only from the loop's own thread."""
        self._start(
            coroutine,
            lambda exc: self._on_failure(ConnectorDead(Fatal.HOUSEKEEPING_ENDED, exc)),
        )

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """Run a coroutine on the loop and wait for its result. Any thread but the loop's."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def close(self) -> None:
        """Cancel all tasks and end the thread. Idempotent."""
        self._is_closing = True
        if not self._thread.is_alive():
            return
        with suppress(RuntimeError):  # it has ended by itself in this moment
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
            self._cancel_tasks()
            self._loop.close()

    def _cancel_tasks(self) -> None:
        """Cancel all tasks and run the loop until they have ended. ``close`` may stop the loop
        meanwhile, if it did not end by ``close``: then it runs on."""
        cancelling = self._loop.create_task(_cancel_all())
        cancelling.add_done_callback(lambda _: self._loop.stop())
        while not cancelling.done():
            self._loop.run_forever()
        cancelling.result()

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
        self, request_id: str, function: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        try:
            function(*args)
        except Exception as exc:  # noqa: BLE001  # request top: only this request fails
            self._fail(request_id, exc)

    def _fail(self, request_id: str | None, exc: Exception) -> None:
        logger.error(
            "the connector failed in %s",
            f"request {request_id}" if request_id else "a task without a request",
            exc_info=exc,
        )
        if isinstance(exc, ConnectorDead):
            self._on_failure(exc)
            return
        if request_id is None:
            return
        try:
            self._on_error(request_id, exc)
        except Exception as again:  # noqa: BLE001  # failing the request failed
            self._on_failure(ConnectorDead(Fatal.HOUSEKEEPING_ENDED, again))


async def _cancel_all() -> None:
    """Cancel every other task of the loop, including those that tasks have started, such as
    connection attempts. Repeated, because a task may start others while it is cancelled."""
    for _ in range(3):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            return
        for task in others:
            task.cancel()
        ended, _ = await asyncio.wait(others, timeout=CLOSE_TIMEOUT_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # mark as retrieved: the loop ends, and the owner was notified


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one: each peer costs several per rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    with suppress(ValueError, OSError):  # the kernel may allow fewer than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logger.info("this process may open %d files and connections, up from %d", hard, soft)
