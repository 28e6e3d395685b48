"""Coroutines that run straight from read events, without an asyncio task.

A task costs three turns of the loop per request here: one to start it, one per answer it waits for.
A `Driver` starts its coroutine inside the read event that brought the request, and a `Bell` resumes
it inside the event that brought the answer. Nothing lies between an answer and the one who waits
for it, so there is no moment in which a cancellation could be lost.

Under a driver there is no current task: `asyncio.timeout` has to run in a task of its own
(`await loop.create_task(...)`), and raises RuntimeError otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any


class Bell:
    """What one coroutine waits for, under a driver or in a task, as often as it likes.

    It only wakes: what happened is written elsewhere, so wait in a loop. Nobody there to hear it,
    nothing happens.
    """

    # Tasks take everything for a future that has this attribute (asyncio's own protocol).
    __slots__ = (
        "_asyncio_future_blocking",
        "_callback",
        "_context",
        "_is_cancelled",
        "_loop",
        "driver",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asyncio_future_blocking = False
        # Who waits: a driver, or a task by its callback and context.
        self.driver: Driver | None = None
        self._callback: Callable[[Any], object] | None = None
        self._context: Context | None = None
        self._is_cancelled = False

    def __await__(self) -> Generator[Bell, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def ring(self) -> None:
        """Wake who waits: a driver at once, a task in the next turn of the loop.

        Not to be called from within a task where a driver may wait (see `ring_soon`).
        """
        driver = self.driver
        if driver is not None:
            self.driver = None
            driver.step()
        elif self._callback is not None:
            callback, self._callback = self._callback, None
            self._loop.call_soon(callback, self, context=self._context)

    def ring_soon(self) -> None:
        """The same in the next turn of the loop: from anywhere."""
        self._loop.call_soon(self.ring)

    # ------------------------------------------------ what tasks expect of a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of both sides."""
        return self._loop

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context) -> None:
        """A task waits."""
        self._is_cancelled = False
        self._callback = callback
        self._context = context

    def cancel(self, msg: str | None = None) -> bool:
        """The task that waits was cancelled."""
        self._is_cancelled = True
        self.ring()
        return True

    def result(self) -> None:
        """Tasks ask before they go on."""
        if self._is_cancelled:
            raise asyncio.CancelledError


class Driver:
    """Runs one coroutine; `on_end` gets None, or the exception that ended it."""

    __slots__ = ("_coroutine", "_is_cancelled", "_loop", "_on_end", "_waits_for")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._on_end = on_end
        # A Bell, or a future of asyncio's.
        self._waits_for: Any = None
        self._is_cancelled = False

    def step(self, _: object = None) -> None:
        """Run until the coroutine waits again, or ends."""
        try:
            if self._is_cancelled:
                self._is_cancelled = False
                waits_for = self._coroutine.throw(asyncio.CancelledError())
            else:
                waits_for = self._coroutine.send(None)
        except StopIteration:
            self._waits_for = None
            self._on_end(None)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  # on_end reports it
            self._waits_for = None
            self._on_end(error)
        else:
            self._waits_for = waits_for
            if type(waits_for) is Bell:
                waits_for.driver = self
            elif waits_for is None:  # a bare yield
                self._loop.call_soon(self.step)
            else:
                waits_for._asyncio_future_blocking = False
                waits_for.add_done_callback(self.step)

    def cancel(self) -> None:
        """Raise CancelledError where the coroutine waits: at once for a bell, else as a task
        would. Called from the loop, never from the coroutine itself."""
        waits_for = self._waits_for
        self._is_cancelled = True
        if type(waits_for) is Bell:
            waits_for.driver = None
            self.step()
        elif waits_for is not None and waits_for.cancel():
            self._is_cancelled = False  # the future will say so
