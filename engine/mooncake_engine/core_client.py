"""A core in a process of its own, as this one sees it: what is said both ways, and how it ends.

HTTP, tokenising and streaming in one interpreter and the scheduler in another: neither's steps wait
for the other's lock (vLLM and SGLang are built so, too). ``CoreConnection`` has the methods of
``EngineCore`` that ``AsyncEngine`` calls, so that it does not know which of them it runs;
``CoreClient`` also starts the process. API workers beside it have connections of their own.

A connection carries pickles: both ends are this program, one started by the other. Updates, of
which there is one per token, travel as msgpack, at a fifth of the time.
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
    Ask,
    Command,
    Failed,
    LoadProgress,
    Message,
    PrepareGrammar,
    ProgressHandler,
    ReadFigures,
    Reply,
    Report,
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
    PortTaken,
)
from mooncake_engine.messages import EngineStats, TokenUpdate
from mooncake_engine.step_watchdog import STATE_BYTES, StepWatch
from mooncake_hal.command_line import LogSettings, describe_exit, import_path
from mooncake_kv.connector import CompatibilityReport, Topology
from mooncake_kv.kv_events import KVEventEndpoints

_PATIENCE_S = 0.1
"""How long a step waits for updates."""
_WATCHED_TIMES = 1.25
"""So many times longer than the core's own watchdog waits, who knows more of what hangs."""
_END_TIMEOUT_S = 8.0
_DUMP_S = 2.0
_START_ERRORS = (PortTaken, ConfigError, CheckpointError)


def no_reply(_value: bool) -> None:
    """Stands for a reply that is wanted in another process."""


def error_of(failed: Failed) -> EngineError:
    """What another process failed with, to be raised here."""
    for kind in _START_ERRORS:
        if kind.__name__ == failed.kind:
            return kind(failed.reason)
    return EngineDead(failed.reason)


def watch_from(config: EngineConfig, state: int) -> StepWatch:
    """How a process beside the core's watches its steps.

    Args:
        config: of the instance.
        state: descriptor of the memory that all of them share.
    """
    timeout_s = config.step_timeout_s * _WATCHED_TIMES
    return StepWatch(timeout_s, mmap.mmap(state, STATE_BYTES))


class CoreConnection:
    """Speaks for a core of another process.

    Args:
        connection: to it.
        watch: of its steps.
        why_gone: says why the connection has ended; it may wait for that.
    """

    figures_lag = True

    def __init__(
        self, connection: Connection, watch: StepWatch, why_gone: Callable[[], EngineDead]
    ) -> None:
        self.watch = watch
        self.compiles_grammars = False
        self._connection = connection
        self._why_gone = why_gone
        self._readable = select.poll()  # the connection's own makes a selector each time
        self._readable.register(connection.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._replies: dict[int, Callable[[bool], None]] = {}
        self._report = Report(EngineStats(), None, None, None)

    def note_started(self, started: Started) -> None:
        """The core is ready to step."""
        self.compiles_grammars = started.compiles_grammars
        self._report = started.report

    def step(self) -> list[TokenUpdate]:
        """The next updates; [] after a while without any.

        Raises:
            EngineDead: the core died.
        """
        if not self._readable.poll(_PATIENCE_S * 1e3):
            return []
        message = self._receive()
        if isinstance(message, list):
            return message
        if isinstance(message, Report):
            self._report = message
        elif isinstance(message, Reply):
            self._replies.pop(message.number)(message.value)
        return []

    def post(self, command: Command) -> None:
        """As ``EngineCore.post``. Any thread; a core that is gone shows in ``step``."""
        if isinstance(command, Wake):
            return  # ``step`` never sleeps for long
        if isinstance(command, (ResetPrefixCache, PrepareGrammar, ReadFigures)):
            number = next(self._numbers)
            self._replies[number] = command.reply
            self._send(Ask(number, replace(command, reply=no_reply)))
        else:
            self._send(command)

    def stats(self) -> EngineStats:
        """As ``EngineCore.stats``."""
        return self._report.stats

    def pairing(self) -> CompatibilityReport | None:
        """As ``EngineCore.pairing``."""
        return self._report.pairing

    def topology(self) -> Topology | None:
        """As ``EngineCore.topology``."""
        return self._report.topology

    def kv_event_endpoints(self) -> KVEventEndpoints | None:
        """As ``EngineCore.kv_event_endpoints``."""
        return self._report.kv_event_endpoints

    def abandon_step(self) -> EngineDead:
        """As ``EngineCore.abandon_step``; ending the core is for whoever started it."""
        return EngineDead(f"{self.watch.why_stuck()}; the core's process was ended")

    def close(self) -> None:
        """Nothing more is asked of the core, which goes on. Idempotent."""
        with self._lock:
            self._connection.close()

    def _send(self, message: object) -> None:
        encoded = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._lock:
                self._connection.send_bytes(encoded)
        except OSError:  # it has ended, or we have closed: ``step`` says so
            return

    def _receive(self) -> Message | list[TokenUpdate]:
        """The next message; one that the core ends with is raised."""
        try:
            encoded = self._connection.recv_bytes()
        except (EOFError, OSError):
            raise self._why_gone() from None
        if encoded[0] == UPDATES:
            return decode_updates(memoryview(encoded)[1:])
        message: Message = pickle.loads(memoryview(encoded)[1:])
        if isinstance(message, Failed):
            raise error_of(message)
        return message


class CoreClient(CoreConnection):
    """Starts a core's process and speaks for it.

    Args:
        config: what it loads.
        num_workers: how many other processes are to have a connection to it.
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
        """Of the core's process."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when ``step`` has something to do."""
        return self._connection.fileno()

    def wait_started(
        self, progress: ProgressHandler | None = None, meanwhile: Callable[[], None] | None = None
    ) -> Started:
        """Block until the core is ready to step.

        Args:
            progress: told while weights are read.
            meanwhile: called some times a second; what it raises ends the waiting.

        Raises:
            ConfigError, CheckpointError: it can't be set up as asked.
            EngineDead: its process ended.
        """
        while True:
            if meanwhile is not None:
                meanwhile()
            if not self._readable.poll(_PATIENCE_S * 1e3):
                continue
            message = self._receive()
            if isinstance(message, Started):
                self.note_started(message)
                return message
            if isinstance(message, LoadProgress) and progress is not None:
                progress(message)

    def abandon_step(self) -> EngineDead:
        """As ``EngineCore.abandon_step``, of a core whose own watchdog does not run either, as a
        thread holds its interpreter's lock: its process writes where its threads stand, and is
        killed. Any thread."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGABRT)
            self._await_end(_DUMP_S)
        return super().abandon_step()

    def close(self) -> None:
        """Have the core end, and wait for it. Idempotent."""
        if self._process.poll() is None:
            self._send(Stop())
            deadline = time.monotonic() + _END_TIMEOUT_S
            while self._process.poll() is None and time.monotonic() < deadline:
                self._discard()
        self._await_end(0.0)
        if self.state >= 0:
            os.close(self.state)
            self.state = -1

    def _describe_end(self) -> EngineDead:
        self._await_end(_END_TIMEOUT_S)
        end = describe_exit(self._process.returncode)
        return EngineDead(f"the core's process {end}; its log says why")

    def _discard(self) -> None:
        """Read on while the core ends: what it still says must not keep it from ending."""
        try:
            if self._connection.poll(_PATIENCE_S):
                self._connection.recv_bytes()
        except (EOFError, OSError):
            self._await_end(_PATIENCE_S)

    def _await_end(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
