"""Client side of an engine core that runs in a process of its own: connection, start and shutdown.

HTTP, tokenising and streaming run in one interpreter and the scheduler in another, so that neither
waits for the other's GIL (vLLM and SGLang do the same). ``CoreConnection`` implements the methods
of ``EngineCore`` that ``AsyncEngine`` calls, so that ``AsyncEngine`` works with either.
``CoreClient`` also starts the process. Each API worker beside it has a connection of its own.

A connection carries pickles, since both ends are this program, one started by the other. Updates,
of which there is one per token, travel as msgpack, which takes a fifth of the time.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe

from mooncake_engine.config import EngineConfig
from mooncake_engine.core_messages import (
    UPDATES,
    AddRequest,
    Ask,
    Command,
    CoreReport,
    Failed,
    LoadProgress,
    Message,
    PrepareGrammar,
    ProgressHandler,
    PromptEncoder,
    RefreshReport,
    Reply,
    ResetPrefixCache,
    Start,
    Started,
    Stop,
    Wake,
    decode_updates,
)
from mooncake_engine.errors import (
    CheckpointError,
    ConfigError,
    EngineDead,
    EngineError,
    PortInUse,
)
from mooncake_engine.messages import EngineStats, TokenUpdate
from mooncake_engine.process.message_sender import MessageSender
from mooncake_engine.step_watchdog import STATE_BYTES, StepWatch
from mooncake_hal.command_line import LogSettings, describe_exit, import_path

_POLL_S = 0.1
"""Seconds that a step waits for updates."""
_TIMEOUT_FACTOR = 1.25
"""Timeout of steps here, as a multiple of the core's own. The core's watchdog comes first, because
it knows more about what hangs."""
_EXIT_TIMEOUT_S = 20.0
"""Seconds that the core's process has to exit before it is killed. That is more than it gives its
ranks (10 s) and other nodes (5 s), so that it can end them in order."""
_DUMP_S = 2.0
"""Seconds that a hung core's process has to dump its stacks before it is killed."""
_START_ERRORS = (PortInUse, ConfigError, CheckpointError)


def no_reply(_value: bool) -> None:
    """Placeholder for a reply callback that stays in the process that asked."""


def error_of(failed: Failed) -> EngineError:
    """Returns the error to raise here for a failure in another process."""
    for kind in _START_ERRORS:
        if kind.__name__ == failed.kind:
            return kind(failed.reason)
    return EngineDead(failed.reason)


def watch_from(config: EngineConfig, state: int) -> StepWatch:
    """Returns the watchdog state with which another process watches the core's steps.

    Args:
        config: the instance's config.
        state: file descriptor of the shared memory with the state.
    """
    timeout_s = config.step_timeout_s * _TIMEOUT_FACTOR
    return StepWatch(timeout_s, mmap.mmap(state, STATE_BYTES))


class CoreConnection:
    """A connection to a core in another process, with the methods of ``EngineCore``.

    Args:
        connection: connection to the core's process.
        watch: watchdog state of the core's steps.
        end_reason: returns the reason once the connection has ended; may block to find it out.
    """

    report_lags = True

    def __init__(
        self, connection: Connection, watch: StepWatch, end_reason: Callable[[], EngineDead]
    ) -> None:
        self.watch = watch
        self.compiles_grammars = False
        self._connection = connection
        self._sender = MessageSender(connection)
        self._end_reason = end_reason
        self._readable = select.poll()  # Connection.poll creates a selector per call
        self._readable.register(connection.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._prompts = PromptEncoder()
        self._numbers = itertools.count()
        self._replies: dict[int, Callable[[bool], None]] = {}
        self._report = CoreReport(EngineStats(), None, None, None)

    def note_started(self, started: Started) -> None:
        """Store what the core reported when it became ready."""
        self.compiles_grammars = started.compiles_grammars
        self._report = started.report

    def step(self) -> list[TokenUpdate]:
        """Returns the next updates; [] if none arrive within ``_POLL_S``.

        Raises:
            EngineDead: the core died.
        """
        if not self._readable.poll(_POLL_S * 1e3):
            return []
        message = self._receive()
        if isinstance(message, list):
            return message
        if isinstance(message, CoreReport):
            self._report = message
        elif isinstance(message, Reply):
            self._replies.pop(message.number)(message.value)
        return []

    def post(self, command: Command) -> None:
        """Send a command to the core, without waiting until it has read the ones before. Any
        thread. If the core is gone, ``step`` raises that."""
        if isinstance(command, Wake):
            return  # ``step`` never waits for long
        if isinstance(command, (ResetPrefixCache, PrepareGrammar, RefreshReport)):
            number = next(self._numbers)
            self._replies[number] = command.reply
            self._send(Ask(number, replace(command, reply=no_reply)))
        elif isinstance(command, AddRequest):
            with self._lock:  # a request may refer to the one before
                self._send(self._prompts.take_out(command.request))
        else:
            self._send(command)

    def report(self) -> CoreReport:
        return self._report

    def abandon_step(self) -> EngineDead:
        """Returns the error to report; the process that started the core terminates it."""
        return EngineDead(f"{self.watch.timeout_message()}; the core's process was ended")

    def close(self) -> None:
        """Close the connection; the core keeps running. Idempotent."""
        self._sender.close()
        self._connection.close()

    def _send(self, message: object) -> None:
        self._sender.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _receive(self) -> Message | list[TokenUpdate]:
        """Returns the next message; raises the core's failure if it has reported one."""
        try:
            encoded = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._end_reason() from None
        if encoded[0] == UPDATES:
            return decode_updates(memoryview(encoded)[1:])
        message: Message = pickle.loads(memoryview(encoded)[1:])
        if isinstance(message, Failed):
            raise error_of(message)
        return message


class CoreClient(CoreConnection):
    """Starts and owns a core's process, and connects to it.

    Args:
        config: the engine's config.
        num_workers: number of API workers that get a connection of their own.

    Attributes:
        state: file descriptor of the memory with the watchdog state.
        for_workers: connections for the API workers.
    """

    def __init__(self, config: EngineConfig, num_workers: int = 0) -> None:
        pairs = [Pipe() for _ in range(1 + num_workers)]
        self.state = os.memfd_create("mooncake-step-watch")
        os.ftruncate(self.state, STATE_BYTES)
        super().__init__(pairs[0][0], watch_from(config, self.state), self._describe_end)
        self.for_workers = [ours for ours, _ in pairs[1:]]
        descriptors = (self.state, *(theirs.fileno() for _, theirs in pairs))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mooncake_engine.core_process", *map(str, descriptors)],
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": import_path()},
            stdin=subprocess.DEVNULL,
        )
        for _, theirs in pairs:
            theirs.close()
        self._send(Start(config, LogSettings.current()))

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._process.pid

    def fileno(self) -> int:
        """Returns a descriptor that is readable when ``step`` has a message to process."""
        return self._connection.fileno()

    def wait_started(
        self, progress: ProgressHandler | None = None, meanwhile: Callable[[], None] | None = None
    ) -> Started:
        """Block until the core is ready to step.

        Args:
            progress: called while weights are loaded.
            meanwhile: called several times a second; an exception that it raises ends the wait.

        Raises:
            ConfigError, CheckpointError: the engine can't be set up as configured.
            EngineDead: the core's process exited.
        """
        while True:
            if meanwhile is not None:
                meanwhile()
            if not self._readable.poll(_POLL_S * 1e3):
                continue
            message = self._receive()
            if isinstance(message, Started):
                self.note_started(message)
                return message
            if isinstance(message, LoadProgress) and progress is not None:
                progress(message)

    def abandon_step(self) -> EngineDead:
        """Have the process dump its threads' stacks, and kill it: its own watchdog does not run
        either, for example because a thread holds the GIL. Any thread."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGABRT)
            self._await_exit(_DUMP_S)
        return super().abandon_step()

    def close(self) -> None:
        """Stop the core's process and wait for it to exit. Idempotent."""
        if self._process.poll() is None:
            self._send(Stop())
            deadline = time.monotonic() + _EXIT_TIMEOUT_S
            while self._process.poll() is None and time.monotonic() < deadline:
                self._drop_message()
        self._await_exit(0.0)
        self._sender.close()
        if self.state >= 0:
            os.close(self.state)
            self.state = -1

    def _describe_end(self) -> EngineDead:
        self._await_exit(_EXIT_TIMEOUT_S)
        end = describe_exit(self._process.returncode)
        return EngineDead(f"the core's process {end}; its log says why")

    def _drop_message(self) -> None:
        """Read and drop a message while the core shuts down, so that its sends don't block."""
        try:
            if self._connection.poll(_POLL_S):
                self._connection.recv_bytes()
        except (EOFError, OSError):
            self._await_exit(_POLL_S)

    def _await_exit(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
