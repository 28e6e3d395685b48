"""Supervises child processes: restarts, stop signals, and a group of children that ends with its
parent.

A child that dies after it has been ready may be restarted, at the same address; otherwise the
parent ends, too. A child that the others don't depend on is always restarted. Each child leads a
process group of its own, so that a terminal's Ctrl-C reaches the parent only, and stopping a child
also stops the processes that it has started. The kernel terminates it if the parent is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar
from urllib.parse import urlsplit

from mooncake_engine.errors import EngineError
from mooncake_hal.command_line import describe_exit

_MIN_DELAY_S = 1.0
"""Delay before the first restart, in seconds; it doubles with each further one."""
_MAX_DELAY_S = 30.0
"""Maximum delay before a restart, in seconds."""
_STEADY_S = 60.0
"""Seconds after which a running program gets back its full number of restarts."""


class RestartPolicy:
    """Decides how often, and after which delay, one program is restarted; pure.

    Args:
        max_restarts: maximum number of consecutive restarts; None for no limit.
    """

    def __init__(self, max_restarts: int | None) -> None:
        self.max_restarts = max_restarts
        self.num_consecutive = 0

    def next_delay_s(self, ran_s: float) -> float | None:
        """Returns the delay before the next restart of a program that has died, in seconds; None if
        no restart is left. The delay doubles with each consecutive restart.

        Args:
            ran_s: seconds that the program had been running.
        """
        if ran_s >= _STEADY_S:
            self.num_consecutive = 0
        if self.max_restarts is not None and self.num_consecutive >= self.max_restarts:
            return None
        doublings = min(self.num_consecutive, _MAX_DELAY_S)
        self.num_consecutive += 1
        return float(min(_MIN_DELAY_S * 2.0**doublings, _MAX_DELAY_S))

    def __str__(self) -> str:
        """Returns the number of the current restart, for log lines."""
        of_max = "" if self.max_restarts is None else f" of {self.max_restarts}"
        return f"restart {self.num_consecutive}{of_max}"


_SAME_SIGNAL_S = 1.0
"""Signals within this many seconds count as a single one: terminals and service managers signal
several processes, and some of these forward the signal."""


class StopSignals:
    """Interprets SIGINT and SIGTERM: the first signal requests a graceful stop, a later one an
    immediate stop.

    Attributes:
        requested_at: time of the first signal, in seconds; None before it.
        is_forced: whether a later signal has arrived.
    """

    def __init__(self) -> None:
        self.requested_at: float | None = None
        self.is_forced = False

    def note(self, now: float) -> bool:
        """Process a signal at ``now``, in seconds of a steady clock; returns whether it is the
        first one."""
        if self.requested_at is None:
            self.requested_at = now
            return True
        if now - self.requested_at > _SAME_SIGNAL_S:
            self.is_forced = True
        return False


logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_URL = re.compile(r"(?:https?|tcp)://\S+")
_PR_SET_PDEATHSIG = 1
_KILL_DELAY_S = 5.0
"""Seconds from the second SIGTERM to SIGKILL."""
_MAX_LINE_BYTES = 1 << 20
"""Maximum length of a child's line, in bytes."""
_NUM_TAIL_LINES = 3
"""Number of last lines that are kept of a child's standard error."""
_NAMES_ERROR = re.compile(r"\b(ERROR|CRITICAL)\b|\berror:|^[\w.]*(Error|Exception)\b")
"""Matches a log line of level ERROR or CRITICAL, a command's error message, or the last line of a
traceback."""


class ChildDied(EngineError):
    """A child has died; the message contains its last lines on standard error."""


class StderrTail:
    """Keeps a program's last lines on standard error, and its last errors."""

    def __init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._lines: deque[str] = deque(maxlen=_NUM_TAIL_LINES)
        self._is_in_traceback = False

    def note(self, line: str) -> None:
        """Add a line."""
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
            return f"it logged no error; its last lines are: {'; '.join(self._lines)}"
        return "it wrote nothing to standard error"


class Child:
    """One running program, whose output is relayed to a log.

    Args:
        name: its name in logs and errors.
        process: its process.
        log: stream for its output lines.
        layout: formats a log line from the program's name and an output line.

    Attributes:
        ready: resolves to the URL that the program prints on standard output once it is ready.
        ended: completes when the program has exited and its output has been relayed.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        log: TextIO,
        layout: Callable[[str, str], str],
    ) -> None:
        self.name = name
        self.process = process
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.ensure_future(self._end())
        self._log = log
        self._layout = layout
        self._stderr_tail = StderrTail()
        self._has_dropped_lines = False

    def error(self) -> ChildDied:
        """Returns the error to raise for a program that has died."""
        status = self.process.returncode
        assert status is not None
        return ChildDied(f"{self.name} died, {describe_exit(status)}: {self._stderr_tail}")

    async def stop(self, stop_timeout_s: float, forced: asyncio.Event) -> None:
        """Stop the program and all processes that it has started: by SIGTERM, a second SIGTERM, and
        SIGKILL.

        Args:
            stop_timeout_s: seconds from the first to the second SIGTERM.
            forced: set to send the second SIGTERM at once.
        """
        self._signal_group(signal.SIGTERM)
        force = asyncio.ensure_future(forced.wait())
        await asyncio.wait(
            {self.ended, force}, timeout=stop_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        force.cancel()
        if not self.ended.done():
            self._signal_group(signal.SIGTERM)  # the second: don't wait for running requests
            await asyncio.wait({self.ended}, timeout=_KILL_DELAY_S)
        self.kill_group()
        await self.ended

    def kill_group(self) -> None:
        """Kill all remaining processes of its group."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def _end(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        relays = [self._relay(self.process.stdout, self._announce)]
        relays.append(self._relay(self.process.stderr, self._stderr_tail.note))
        await asyncio.gather(*relays, self.process.wait())

    async def _relay(self, stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
        async for raw in _lines(stream):
            line = raw.decode(errors="replace").rstrip()
            on_line(line)
            self._write_log(line)

    def _write_log(self, line: str) -> None:
        """Write a line to the log, or drop it: a child whose output is not read would block."""
        try:
            self._log.write(f"{self._layout(self.name, line)}\n")
            self._log.flush()
        except OSError as exc:  # a full disk, or a closed pipe
            if not self._has_dropped_lines:
                self._has_dropped_lines = True
                logger.warning("can't write the log of %s: %s; lines are missing", self.name, exc)

    def _announce(self, line: str) -> None:
        url = _URL.search(line)
        if url is not None and not self.ready.done():
            self.ready.set_result(url[0])


async def _lines(stream: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a stream, and a note instead of one that is longer than _MAX_LINE_BYTES,
    such as a progress bar's: a child whose output is not read would block."""
    is_cut = False
    while True:
        try:
            line = await stream.readuntil()
        except asyncio.IncompleteReadError as exc:  # the end of the stream
            line = exc.partial
        except asyncio.LimitOverrunError as exc:
            await stream.readexactly(exc.consumed)
            is_cut = True
            continue
        if is_cut:
            is_cut = False
            yield b"(a line of more than %d bytes was dropped)" % _MAX_LINE_BYTES
        elif line:
            yield line
        else:
            return


def text_line(name: str, line: str) -> str:
    """Formats a child's line for a log that several children share."""
    return f"{name:>9} │ {line}"


def json_line(name: str, line: str) -> str:
    """Formats a child's line as JSON: the line's own object with the child's name added, or an
    object with the line as its message."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        found = {"time": round(time.time(), 3), "level": "INFO", "message": line}
    return json.dumps({"process": name, **found})


class _SupervisedChild:
    """A child across its restarts."""

    def __init__(self, name: str, argv: Sequence[str], restarts: RestartPolicy) -> None:
        self.name = name
        self.argv = argv
        self.restarts = restarts
        self.child: Child | None = None
        self.url: str | None = None
        self.started_at = 0.0


class ChildProcesses:
    """Starts and supervises children. An async context manager that stops all of them on exit;
    create it in a running event loop.

    Args:
        log_dir: directory for one log file per child; None relays all output to standard error.
        stop_timeout_s: seconds that a child has to stop after SIGTERM.
        max_restarts: maximum number of consecutive restarts of a child.
        has_json_lines: whether the children's output is relayed as JSON.

    Attributes:
        is_stopping: whether the children are being stopped.
    """

    def __init__(
        self,
        log_dir: Path | None = None,
        stop_timeout_s: float = 15.0,
        max_restarts: int = 0,
        *,
        has_json_lines: bool = False,
    ) -> None:
        self._layout = json_line if has_json_lines else text_line
        self._log_dir = log_dir
        self._stop_timeout_s = stop_timeout_s
        self._max_restarts = max_restarts
        self._forced = asyncio.Event()
        self.is_stopping = False
        self._logs: dict[str, TextIO] = {}
        self._supervised: list[_SupervisedChild] = []
        self._restarting: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    async def start(self, name: str, argv: Sequence[str], *, is_needed: bool = True) -> Child:
        """Start a program.

        Args:
            name: its name in logs and errors.
            argv: its command line.
            is_needed: whether the other children depend on it. If not, they keep running without
                it, and it is restarted without limit after it has been ready once.
        """
        restarts = RestartPolicy(self._max_restarts if is_needed else None)
        supervised = _SupervisedChild(name, argv, restarts)
        self._supervised.append(supervised)
        return await self._run(supervised)

    async def _run(self, supervised: _SupervisedChild) -> Child:
        address = [] if supervised.url is None else ["--port", str(urlsplit(supervised.url).port)]
        process = await asyncio.create_subprocess_exec(
            *supervised.argv,
            *address,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
            limit=_MAX_LINE_BYTES,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},  # siblings share cores: don't spin
        )
        child = Child(supervised.name, process, self._open_log(supervised.name), self._layout)
        supervised.child, supervised.started_at = child, asyncio.get_running_loop().time()
        child.ended.add_done_callback(lambda _: self._note_end(supervised, child))
        return child

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run ``work``, which may start further children; returns its result.

        Raises:
            ChildDied: a child has died and won't be restarted; ``work`` has been cancelled.
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
        """Stop all children. The one that was started last depends on the others and is stopped
        first."""
        self.is_stopping = True
        for restarting in self._restarting:
            restarting.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        children = [one.child for one in self._supervised if one.child is not None]
        for child in children[-1:]:
            await child.stop(self._stop_timeout_s, self._forced)
        rest = (child.stop(self._stop_timeout_s, self._forced) for child in children[:-1])
        await asyncio.gather(*rest)
        for file in self._logs.values():
            with suppress(OSError):  # it writes what it could not write before
                file.close()

    def force_stop(self) -> None:
        """Send the second SIGTERM at once to children that are being stopped, or will be."""
        self._forced.set()

    def _note_end(self, supervised: _SupervisedChild, child: Child) -> None:
        if self.is_stopping:
            return
        if child.ready.done():
            supervised.url = child.ready.result()
        ran_s = asyncio.get_running_loop().time() - supervised.started_at
        delay_s = None if supervised.url is None else supervised.restarts.next_delay_s(ran_s)
        if delay_s is None:
            self._fail(child.error())
            return
        logger.error("%s; restarting it in %g s (%s)", child.error(), delay_s, supervised.restarts)
        restarting = asyncio.ensure_future(self._run_again(supervised, child, delay_s))
        self._restarting.add(restarting)
        restarting.add_done_callback(self._restarting.discard)

    async def _run_again(self, supervised: _SupervisedChild, dead: Child, delay_s: float) -> None:
        dead.kill_group()
        await asyncio.sleep(delay_s)
        try:
            await self._run(supervised)
        except OSError as exc:
            self._fail(ChildDied(f"{supervised.name} can't be restarted: {exc}"))

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


def die_with_parent() -> Callable[[], None] | None:
    """Returns a ``preexec_fn`` for ``Popen``, with which the kernel terminates the child when the
    thread that started it ends; None on systems other than Linux."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return ask_kernel
