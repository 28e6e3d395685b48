"""Steps independent data-parallel ranks on one core thread: each rank's next step is launched as
soon as its last one has completed, whatever the other ranks are doing."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from mooncake_engine.core import IDLE_WAIT_S, EngineCore
from mooncake_engine.messages import TokenUpdate
from mooncake_engine.scheduling.step_plan import StepPlan
from mooncake_engine.step_watchdog import StepWatch

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue whose one consumer thread can wait for it and for the ranks' reports at once."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._awake, self._wake = socket.socketpair()
        for end in (self._awake, self._wake):
            end.setblocking(False)

    def put(self, item: T) -> None:
        """Add an item. Any thread; after ``close`` the item is never taken."""
        self._items.put(item)
        try:
            self._wake.send(b"\0")
        except OSError:
            return  # full, so the consumer wakes anyway; or closed

    @property
    def is_empty(self) -> bool:
        """Whether ``take`` would yield nothing."""
        return self._items.empty()

    def take(self) -> Iterator[T]:
        """Remove and yield all items."""
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(1 << 16)
        try:
            while True:
                yield self._items.get_nowait()
        except Empty:
            return

    def fileno(self) -> int:
        """Returns a descriptor for ``multiprocessing.connection.wait``, readable if there may be
        items."""
        return self._awake.fileno()

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._awake.close()
        self._wake.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A rank whose oldest step is awaited. ``plan`` is the last one that it planned."""

    core: EngineCore
    plan: StepPlan
    is_launched: bool


class RankTurns(Generic[T]):
    """Launches and completes the steps of independent data-parallel ranks.

    Args:
        cores: cores of the ranks.
        inbox: queue of commands; a new one interrupts the wait for steps.
        handle: handles one command, whether steps are in flight or not.
        watch: watchdog state, updated when steps begin and end. It covers the step in flight that
            began first, so that a rank that hangs is noticed while others continue.
    """

    def __init__(
        self,
        cores: Sequence[EngineCore],
        inbox: Inbox[T],
        handle: Callable[[T], None],
        watch: StepWatch,
    ) -> None:
        self._cores = cores
        self._inbox = inbox
        self._handle = handle
        self._watch = watch
        self._in_flight: deque[_Turn] = deque()  # in order of their start

    def run(self) -> list[TokenUpdate]:
        """Handle the posted commands, launch a step on each rank that awaits none, and wait until a
        step in flight completes, another command arrives, or deadlines are due to be checked.

        Raises:
            EngineDead: a rank or a background task died.
        """
        if not self._in_flight:
            self._watch.begin()
        try:
            for item in self._inbox.take():
                self._handle(item)
            updates = [update for core in self._idle_cores() for update in self._launch(core)]
            for turn in self._await_steps(0.0 if updates else self._wait_timeout_s()):
                updates += self._conclude(turn)
            return updates
        finally:
            if not self._in_flight:
                self._watch.end()

    def _idle_cores(self) -> list[EngineCore]:
        """Returns the cores that don't await a step."""
        waiting = [turn.core for turn in self._in_flight]
        return [core for core in self._cores if core not in waiting]

    def _launch(self, core: EngineCore) -> list[TokenUpdate]:
        plan = core.plan()
        is_launched = core.launch(plan)
        if core.must_wait(is_launched=is_launched) and core.step_connections:
            self._in_flight.append(_Turn(core, plan, is_launched))
            return []
        return core.conclude(plan, is_launched=is_launched)

    def _conclude(self, turn: _Turn) -> list[TokenUpdate]:
        updates = turn.core.conclude(turn.plan, is_launched=turn.is_launched)
        was_watched = turn is self._in_flight[0]
        self._in_flight.remove(turn)
        if was_watched and self._in_flight:
            self._watch.begin()
        return updates

    def _await_steps(self, wait_timeout_s: float) -> list[_Turn]:
        """Returns the turns whose step has completed on at least one rank; the other ranks of the
        same step report at about the same time."""
        turns = {each: turn for turn in self._in_flight for each in turn.core.step_connections}
        readable = wait([self._inbox.fileno(), *turns], wait_timeout_s)
        over = [turn for each, turn in turns.items() if each in readable]
        return [turn for turn in self._in_flight if turn in over]

    def _wait_timeout_s(self) -> float:
        return min((core.wait_timeout_s for core in self._idle_cores()), default=IDLE_WAIT_S)
