"""Child programs that end with their parent.

A child that dies once it has been ready may be started again, at the address that it had; else it
takes the parent along. Every child leads a process group of its own, so that a terminal's Ctrl-C
reaches the parent only and stopping a child stops what it has started. The kernel tells it to end
if the parent is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar
from urllib.parse import urlsplit

from mooncake_engine.errors import EngineError
from mooncake_engine.exit_status import describe_exit
from mooncake_engine.restarts import Restarts

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_URL = re.compile(r"https?://\S+")
_PR_SET_PDEATHSIG = 1
_HURRY_S = 5.0
"""From the request to end at once to the end without asking."""
_LONGEST_LINE = 1 << 20
_LAST_WORDS = 3
_NAMES_ERROR = re.compile(r"\b(ERROR|CRITICAL)\b|\berror:|^[\w.]*(Error|Exception)\b")
"""A log line of that level, a program's own refusal, or the end of a traceback."""


class ChildDied(EngineError):
    """A child ended that should have gone on; the message holds its last words."""


class LastWords:
    """What a program said last on standard error: its errors, and its lines of any kind."""

    def __init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=_LAST_WORDS)
        self._lines: deque[str] = deque(maxlen=_LAST_WORDS)
        self._is_in_traceback = False

    def note(self, line: str) -> None:
        """One more line."""
        if not line:
            return
        self._lines.append(line)
        is_continued = self._is_in_traceback and line[0].isspace()
        if not is_continued and (self._is_in_traceback or _NAMES_ERROR.search(line)):
            self._errors.append(line)
        self._is_in_traceback = is_continued or line.startswith("Traceback (most recent call last)")

    def __str__(self) -> str:
        if self._errors:
            return "; ".join(self._errors)
        if self._lines:
            return f"it named no error, its last lines are: {'; '.join(self._lines)}"
        return "without a word"


class Child:
    """One running program. ``ready`` becomes the URL that it prints on standard output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: TextIO) -> None:
        self.name = name
        self.process = process
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.ensure_future(self._end())
        self._log = log
        self._last_words = LastWords()

    def death(self) -> ChildDied:
        """Why everything else has to stop."""
        status = self.process.returncode
        assert status is not None
        return ChildDied(f"{self.name} died, {describe_exit(status)}: {self._last_words}")

    async def stop(self, patience_s: float, hurried: asyncio.Event) -> None:
        """Ask it to end, and see to it that it has, with everything that it started.

        Args:
            patience_s: how long it may take.
            hurried: set when it shall end at once.
        """
        self._signal_group(signal.SIGTERM)
        hurry = asyncio.ensure_future(hurried.wait())
        await asyncio.wait(
            {self.ended, hurry}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurry.cancel()
        if not self.ended.done():
            self._signal_group(signal.SIGTERM)  # a second one: not to wait for answers
            await asyncio.wait({self.ended}, timeout=_HURRY_S)
        self.kill_group()
        await self.ended
        self._log.flush()

    def kill_group(self) -> None:
        """End what it has left behind."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def _end(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        relays = [self._relay(self.process.stdout, self._announce)]
        relays.append(self._relay(self.process.stderr, self._last_words.note))
        await asyncio.gather(*relays, self.process.wait())

    async def _relay(self, stream: asyncio.StreamReader, notice: Callable[[str], None]) -> None:
        async for raw in stream:
            line = raw.decode(errors="replace").rstrip()
            notice(line)
            self._log.write(f"{self.name:>9} │ {line}\n")
            self._log.flush()

    def _announce(self, line: str) -> None:
        url = _URL.search(line)
        if url is not None and not self.ready.done():
            self.ready.set_result(url[0])


class _Place:
    """What is known of a child beyond its processes: they come and go."""

    def __init__(self, name: str, argv: Sequence[str], restarts: Restarts) -> None:
        self.name = name
        self.argv = argv
        self.restarts = restarts
        self.child: Child | None = None
        self.url: str | None = None
        self.started_at = 0.0


class ChildProcesses:
    """Starts children, and stops all of them when left: an async context manager, made in a loop.

    Args:
        log_dir: one log file per child there; None relays everything to standard error.
        patience_s: how long a child may take to end.
        max_restarts: how often in a row a child that dies is started again.
    """

    def __init__(
        self, log_dir: Path | None = None, patience_s: float = 15.0, max_restarts: int = 0
    ) -> None:
        self._log_dir = log_dir
        self._patience_s = patience_s
        self._max_restarts = max_restarts
        self._hurried = asyncio.Event()
        self._is_stopping = False
        self._logs: dict[str, TextIO] = {}
        self._places: list[_Place] = []
        self._restarting: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    async def start(self, name: str, argv: Sequence[str]) -> Child:
        """Run a program."""
        place = _Place(name, argv, Restarts(self._max_restarts))
        self._places.append(place)
        return await self._run(place)

    async def _run(self, place: _Place) -> Child:
        address = [] if place.url is None else ["--port", str(urlsplit(place.url).port)]
        process = await asyncio.create_subprocess_exec(
            *place.argv,
            *address,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
            limit=_LONGEST_LINE,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # siblings share cores: don't spin
        )
        child = Child(place.name, process, self._open_log(place.name))
        place.child, place.started_at = child, asyncio.get_running_loop().time()
        child.ended.add_done_callback(lambda _: self._note_end(place, child))
        return child

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``, which may start further children.

        Raises:
            ChildDied: a child ended meanwhile, for good; ``work`` has been cancelled.
        """
        working = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {working, self._failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise self._failed.result()
            return working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def __aenter__(self) -> ChildProcesses:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop everything; the last one started depends on the others, and goes first."""
        self._is_stopping = True
        for restarting in self._restarting:
            restarting.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        children = [place.child for place in self._places if place.child is not None]
        for child in children[-1:]:
            await child.stop(self._patience_s, self._hurried)
        rest = (child.stop(self._patience_s, self._hurried) for child in children[:-1])
        await asyncio.gather(*rest)
        for file in self._logs.values():
            file.close()

    def hurry(self) -> None:
        """Who is being stopped, or will be, ends at once."""
        self._hurried.set()

    def _note_end(self, place: _Place, child: Child) -> None:
        if self._is_stopping:
            return
        if child.ready.done():
            place.url = child.ready.result()
        ran_s = asyncio.get_running_loop().time() - place.started_at
        delay_s = None if place.url is None else place.restarts.next_delay_s(ran_s)
        if delay_s is None:
            self._fail(child.death())
            return
        restarts = place.restarts
        log.error(
            "%s; it is started again in %g s, for time %d of %d",
            *(child.death(), delay_s, restarts.num_in_a_row, restarts.most),
        )
        restarting = asyncio.ensure_future(self._run_again(place, child, delay_s))
        self._restarting.add(restarting)
        restarting.add_done_callback(self._restarting.discard)

    async def _run_again(self, place: _Place, dead: Child, delay_s: float) -> None:
        dead.kill_group()
        await asyncio.sleep(delay_s)
        try:
            await self._run(place)
        except OSError as exc:
            self._fail(ChildDied(f"{place.name} can't be started again: {exc}"))

    def _fail(self, cause: EngineError) -> None:
        if not self._failed.done():
            self._failed.set_result(cause)

    def _open_log(self, name: str) -> TextIO:
        if self._log_dir is None:
            return sys.stderr
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if name not in self._logs:
            self._logs[name] = (self._log_dir / f"{name}.log").open("w")
        return self._logs[name]


def _die_with_parent() -> Callable[[], None] | None:
    """To be called in the child between fork and exec; the library is loaded before the fork."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask_kernel
