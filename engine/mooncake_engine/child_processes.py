"""Child programs that end with their parent, and that take the parent along when they fail.

Every child leads a process group of its own, so that a terminal's Ctrl-C reaches the parent only
and stopping a child stops what it has started. The kernel tells it to end if the parent is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
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

from mooncake_engine.errors import EngineError

Result = TypeVar("Result")

_URL = re.compile(r"https?://\S+")
_PR_SET_PDEATHSIG = 1
_STOP_S = 15.0
"""From the request to end to the end without asking; longer than the children's own grace."""
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
        return ChildDied(f"{self.name} ended with status {status}: {self._last_words}")

    async def stop(self) -> None:
        """Ask it to end, and see to it that it has, with everything that it started."""
        self._signal_group(signal.SIGTERM)
        await asyncio.wait({self.ended}, timeout=_STOP_S)
        self._signal_group(signal.SIGKILL)
        await self.ended
        self._log.flush()

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


class ChildProcesses:
    """Starts children, and stops all of them when left: an async context manager, made in a loop.

    Args:
        log_dir: one log file per child there; None relays everything to standard error.
    """

    def __init__(self, log_dir: Path | None = None) -> None:
        self._log_dir = log_dir
        self._logs: list[TextIO] = []
        self._children: list[Child] = []
        self._first_end: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

    async def start(self, name: str, argv: Sequence[str]) -> Child:
        """Run a program."""
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
            limit=_LONGEST_LINE,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # siblings share cores: don't spin
        )
        child = Child(name, process, self._open_log(name))
        self._children.append(child)
        child.ended.add_done_callback(lambda _: self._note_end(child))
        return child

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``, which may start further children.

        Raises:
            ChildDied: a child ended meanwhile; ``work`` has been cancelled.
        """
        working = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {working, self._first_end}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise self._first_end.result().death()
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
        for child in self._children[-1:]:
            await child.stop()
        await asyncio.gather(*(child.stop() for child in self._children[:-1]))
        for log in self._logs:
            log.close()

    def _note_end(self, child: Child) -> None:
        if not self._first_end.done():
            self._first_end.set_result(child)

    def _open_log(self, name: str) -> TextIO:
        if self._log_dir is None:
            return sys.stderr
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log = (self._log_dir / f"{name}.log").open("w")
        self._logs.append(log)
        return log


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
