"""How data-parallel ranks that share nothing take turns on the core's thread: each has its next
step launched as soon as its last one is over, whatever the others are doing."""

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
    """A queue that one thread takes from, who may wait for it and for ranks' reports at once."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._awake, self._wake = socket.socketpair()
        for end in (self._awake, self._wake):
            end.setblocking(False)

    def put(self, item: T) -> None:
        """Any thread; an inbox that is closed keeps it to itself."""
        self._items.put(item)
        try:
            self._wake.send(b"\0")
        except OSError:
            return  # full: it wakes whoever waits as it is; or closed

    def take(self) -> Iterator[T]:
        """All that is there."""
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(1 << 16)
        try:
            while True:
                yield self._items.get_nowait()
        except Empty:
            return

    def fileno(self) -> int:
        """Readable once something may be there, for ``multiprocessing.connection.wait``."""
        return self._awake.fileno()

    def close(self) -> None:
        """Idempotent."""
        self._awake.close()
        self._wake.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A rank's step that others need not wait for: ``plan`` is the last one that it launched."""

    core: EngineCore
    plan: StepPlan
    is_launched: bool


class RankTurns(Generic[T]):
    """The turns of data-parallel ranks.

    Args:
        cores: of the ranks.
        inbox: what others want; it ends a wait for steps.
        act: carries one such thing out, whether steps are under way or not.
        watch: told when steps begin and end. Of several that are under way it watches the one that
            began first: a rank that hangs is noticed while others go on.
    """

    def __init__(
        self,
        cores: Sequence[EngineCore],
        inbox: Inbox[T],
        act: Callable[[T], None],
        watch: StepWatch,
    ) -> None:
        self._cores = cores
        self._inbox = inbox
        self._act = act
        self._watch = watch
        self._under_way: deque[_Turn] = deque()  # in the order in which they began

    def run(self) -> list[TokenUpdate]:
        """Act on what has come, launch a step of each rank that waits for none, and wait until
        something happens: one of those under way is over, more has come, or it is time to look at
        deadlines.

        Raises:
            EngineDead: a rank or a background task died.
        """
        if not self._under_way:
            self._watch.begin()
        try:
            for item in self._inbox.take():
                self._act(item)
            updates = [update for core in self._at_rest() for update in self._launch(core)]
            for turn in self._await_steps(0.0 if updates else self._patience_s()):
                updates += self._conclude(turn)
            return updates
        finally:
            if not self._under_way:
                self._watch.end()

    def _at_rest(self) -> list[EngineCore]:
        """Whose steps are none that they would have to wait for."""
        waiting = [turn.core for turn in self._under_way]
        return [core for core in self._cores if core not in waiting]

    def _launch(self, core: EngineCore) -> list[TokenUpdate]:
        plan = core.plan()
        is_launched = core.launch(plan)
        if core.must_wait(is_launched=is_launched) and core.answers:
            self._under_way.append(_Turn(core, plan, is_launched))
            return []
        return core.conclude(plan, is_launched=is_launched)

    def _conclude(self, turn: _Turn) -> list[TokenUpdate]:
        updates = turn.core.conclude(turn.plan, is_launched=turn.is_launched)
        was_watched = turn is self._under_way[0]
        self._under_way.remove(turn)
        if was_watched and self._under_way:
            self._watch.begin()
        return updates

    def _await_steps(self, patience_s: float) -> list[_Turn]:
        """Turns whose step is over, or nearly: the ranks that share one report at about a time."""
        turns = {answer: turn for turn in self._under_way for answer in turn.core.answers}
        readable = wait([self._inbox.fileno(), *turns], patience_s)
        over = [turn for answer, turn in turns.items() if answer in readable]
        return [turn for turn in self._under_way if turn in over]

    def _patience_s(self) -> float:
        return min((core.patience_s for core in self._at_rest()), default=IDLE_WAIT_S)
