"""A core in a process of its own, as this one sees it: what is said both ways, and how it ends.

HTTP, tokenising and streaming in one interpreter and the scheduler in another: neither's steps wait
for the other's lock (vLLM and SGLang are built so, too). ``CoreClient`` has the methods of
``EngineCore`` that ``AsyncEngine`` calls, so that it does not know which of them it runs.

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
from dataclasses import dataclass, replace
from multiprocessing.connection import Pipe

import msgspec

from mooncake_engine.config import EngineConfig
from mooncake_engine.core import Command, PrepareGrammar, ResetPrefixCache, Wake
from mooncake_engine.errors import (
    CheckpointError,
    ConfigError,
    EngineDead,
    EngineError,
    PortTaken,
)
from mooncake_engine.execution.rank_launcher import import_path
from mooncake_engine.execution.weight_loader import LoadProgress, ProgressHandler
from mooncake_engine.messages import EngineInfo, EngineStats, TokenUpdate
from mooncake_engine.step_watchdog import STATE_BYTES, StepWatch
from mooncake_hal.command_line import LogSettings, describe_exit
from mooncake_kv.connector import CompatibilityReport, Topology
from mooncake_kv.kv_events import KVEventEndpoints

UPDATES = 0
"""First byte of a message that is a msgpack list of updates; of any other it is ``OTHER``."""
OTHER = 1

encode_updates = msgspec.msgpack.Encoder().encode
decode_updates = msgspec.msgpack.Decoder(list[TokenUpdate]).decode

_PATIENCE_S = 0.1
"""How long a step waits for updates."""
_WATCHED_TIMES = 1.25
"""So many times longer than the core's own watchdog waits, who knows more of what hangs."""
_END_TIMEOUT_S = 8.0
_DUMP_S = 2.0
_START_ERRORS = (PortTaken, ConfigError, CheckpointError)


@dataclass(frozen=True, slots=True)
class Start:
    """First message to the core.

    Args:
        config: what to load.
        log: how it looks; it goes to the same standard error.
    """

    config: EngineConfig
    log: LogSettings


@dataclass(frozen=True, slots=True)
class Ask:
    """A command whose reply is wanted; ``Reply`` has the number."""

    number: int
    command: ResetPrefixCache | PrepareGrammar


@dataclass(frozen=True, slots=True)
class Stop:
    """Close everything and exit."""


@dataclass(frozen=True, slots=True)
class Reply:
    """To ``Ask``."""

    number: int
    value: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What others ask a core for between steps: some ten times a second if it has changed, and
    with the last update of each request."""

    stats: EngineStats
    pairing: CompatibilityReport | None
    topology: Topology | None
    kv_event_endpoints: KVEventEndpoints | None


@dataclass(frozen=True, slots=True)
class Started:
    """The core is ready to step."""

    info: EngineInfo
    compiles_grammars: bool
    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """The core ends, or never began.

    Args:
        kind: class of the error.
        reason: its words.
    """

    kind: str
    reason: str


Message = LoadProgress | Started | Reply | Report | Failed


def no_reply(_value: bool) -> None:
    """Stands for a reply that is wanted in another process."""


class CoreClient:
    """Starts a core's process and speaks for it.

    Args:
        config: what it loads.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._connection, theirs = Pipe()
        self._readable = select.poll()  # the connection's own makes a selector each time
        self._readable.register(self._connection.fileno(), select.POLLIN)
        state = os.memfd_create("mooncake-step-watch")
        os.ftruncate(state, STATE_BYTES)
        self.watch = StepWatch(
            config.step_timeout_s * _WATCHED_TIMES, mmap.mmap(state, STATE_BYTES)
        )
        descriptors = (theirs.fileno(), state)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mooncake_engine.core_process", *map(str, descriptors)],
            pass_fds=descriptors,
            env={**os.environ, "PYTHONPATH": import_path()},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        os.close(state)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._replies: dict[int, Callable[[bool], None]] = {}
        self._report = Report(EngineStats(), None, None, None)
        self.compiles_grammars = False
        self._send(Start(config, LogSettings.current()))

    @property
    def pid(self) -> int:
        """Of the core's process."""
        return self._process.pid

    def wait_started(self, progress: ProgressHandler | None = None) -> EngineInfo:
        """Block until the core is ready to step.

        Raises:
            ConfigError, CheckpointError: it can't be set up as asked.
            EngineDead: its process ended.
        """
        while True:
            message = self._receive()
            if isinstance(message, Started):
                self._report = message.report
                self.compiles_grammars = message.compiles_grammars
                return message.info
            if isinstance(message, LoadProgress) and progress is not None:
                progress(message)

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
        if isinstance(command, (ResetPrefixCache, PrepareGrammar)):
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
        """As ``EngineCore.abandon_step``, of a core whose own watchdog does not run either, as a
        thread holds its interpreter's lock: its process writes where its threads stand, and is
        killed. Any thread."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGABRT)
            self._await_end(_DUMP_S)
        return EngineDead(f"{self.watch.why_stuck()}; the core's process was ended")

    def close(self) -> None:
        """Have the core end, and wait for it. Idempotent."""
        if self._process.poll() is None:
            self._send(Stop())
            deadline = time.monotonic() + _END_TIMEOUT_S
            while self._process.poll() is None and time.monotonic() < deadline:
                self._discard()
        self._await_end(0.0)

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
            self._await_end(_END_TIMEOUT_S)
            end = describe_exit(self._process.returncode)
            raise EngineDead(f"the core's process {end}; its log says why") from None
        if encoded[0] == UPDATES:
            return decode_updates(memoryview(encoded)[1:])
        message: Message = pickle.loads(memoryview(encoded)[1:])
        if isinstance(message, Failed):
            raise _error(message)
        return message


def _error(failed: Failed) -> EngineError:
    for kind in _START_ERRORS:
        if kind.__name__ == failed.kind:
            return kind(failed.reason)
    return EngineDead(failed.reason)
