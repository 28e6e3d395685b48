"""One of several processes that serve an instance's API:
``python -m mooncake_engine.server.api_worker CONTROL LISTENER CORE WATCH SHARED``.

The arguments are inherited file descriptors: a connection to the parent process, the socket to
listen on, a connection to the core, the shared memory through which the core's steps are watched,
and the shared memory in which workers count requests and metrics. If the connection to the parent
closes, the instance is gone and this process exits at once.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import closing
from dataclasses import replace
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection

from mooncake_engine.async_engine import AsyncEngine
from mooncake_engine.core_client import CoreConnection, watch_from
from mooncake_engine.core_messages import Failed
from mooncake_engine.errors import EngineDead, EngineError
from mooncake_engine.process.interpreter_watchdog import watched_interpreter
from mooncake_engine.process.queued_stderr import queued_stderr
from mooncake_engine.process.worker_counts import COUNTS_BYTES, WorkerCounts
from mooncake_engine.server.api_server import is_dead, open_tracing, run_server
from mooncake_engine.server.api_workers import (
    AbortEverywhere,
    Drain,
    DrainStarted,
    Serve,
    StartWorker,
    StopWorker,
    WorkerReady,
    worker_name,
)
from mooncake_engine.server.app import create_app
from mooncake_engine.server.live_requests import LiveRequests
from mooncake_engine.server.metric_cells import MetricCells, cells_bytes
from mooncake_engine.text.tokenizer import Tokenizer, block_torch_import

logger = logging.getLogger(__name__)

PARENT_GONE = 3
"""Exit status of a worker whose parent process died."""
_REASON_TIMEOUT_S = 5.0
"""Seconds that a worker waits for the parent to send the reason for which the core exited."""


class Parent:
    """The parent process, as a worker sees it: receives its messages in a thread, and sends
    messages to it.

    Args:
        control: the connection to the parent.
    """

    def __init__(self, control: Connection) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._messages: queue.SimpleQueue[Drain | AbortEverywhere | StopWorker] = (
            queue.SimpleQueue()
        )
        self._core_is_ready: queue.SimpleQueue[Serve] = queue.SimpleQueue()
        self._reason: str | None = None
        self._has_reason = threading.Event()
        self._engine: AsyncEngine | None = None
        threading.Thread(target=self._receive, name="parent", daemon=True).start()

    def send(self, message: object) -> None:
        """Send a message to the parent. Callable from any thread. If the parent is gone, this
        process exits."""
        try:
            with self._lock:
                self._control.send(message)
        except OSError:
            os._exit(PARENT_GONE)

    def wait_core(self) -> Serve:
        """Block until the core is ready."""
        return self._core_is_ready.get()

    def set_engine(self, engine: AsyncEngine) -> None:
        """Fail the requests of ``engine`` if the instance dies."""
        self._engine = engine
        if self._reason:
            engine.fail(EngineDead(self._reason))

    def next_message(self) -> Drain | AbortEverywhere | StopWorker | None:
        """The parent's next message, in the order sent; None if there is none."""
        try:
            return self._messages.get_nowait()
        except queue.Empty:
            return None

    def core_exit_error(self) -> EngineDead:
        """The error that says how the core exited. Waits for the parent, which knows the exit
        status of the core's process."""
        self._has_reason.wait(_REASON_TIMEOUT_S)
        return EngineDead(self._reason or "the core's process has exited; its log says why")

    def _receive(self) -> None:
        """Receive the parent's messages until the connection closes. Runs in its own thread."""
        try:
            while True:
                message = self._control.recv()
                if isinstance(message, Serve):
                    self._core_is_ready.put(message)
                    continue
                if isinstance(message, StopWorker):
                    self._note_reason(message.reason)
                self._messages.put(message)
        except (EOFError, OSError):
            os._exit(PARENT_GONE)

    def _note_reason(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._has_reason.set()
        if reason and self._engine is not None:
            self._engine.fail(EngineDead(reason))


class _WorkerBackground:
    """Executes the parent's messages, in the worker's event loop."""

    def __init__(self, parent: Parent, engine: AsyncEngine, live: LiveRequests) -> None:
        self._parent = parent
        self._engine = engine
        self._live = live

    def stop(self, now: float) -> None:
        """Ignore the signal: service managers send signals to every process, but the parent decides
        when a worker stops."""

    def tick(self, now: float) -> bool:
        """Process the parent's messages; returns whether the worker should stop."""
        while (message := self._parent.next_message()) is not None:
            if isinstance(message, Drain):
                self._live.close()
                self._parent.send(DrainStarted())
            elif isinstance(message, AbortEverywhere):
                self._live.abort_here(message.request_id)
            else:
                self._live.close()
                if not message.reason:
                    self._live.fail_all()
                return True
        return is_dead(self._engine)


def serve(start: StartWorker, parent: Parent, descriptors: tuple[int, int, int, int]) -> None:
    """Serve requests until the parent says to stop.

    Args:
        start: the parent's first message, with configuration and options.
        parent: the parent process.
        descriptors: file descriptors of the socket to listen on, the connection to the core, the
            memory with the core's step watch, and the memory in which workers count.

    Raises:
        EngineError: the configuration can't be served, or the engine died.
    """
    listener, core_descriptor, watch, shared = descriptors
    config = start.config
    options = replace(start.options, worker=worker_name(start.number))
    size = cells_bytes(options.api_workers)
    whole = mmap(shared, COUNTS_BYTES + size)
    counts = WorkerCounts(whole, start.number)
    cells = MetricCells(memoryview(whole)[COUNTS_BYTES:], start.number)
    tokenizer = Tokenizer.load(config.model, config.chat_template)
    core = CoreConnection(
        Connection(core_descriptor), watch_from(config, watch), parent.core_exit_error
    )
    started = parent.wait_core().started
    core.note_started(started)
    with (
        socket.socket(fileno=listener) as bound,
        open_tracing(config, options) as tracing,
        closing(AsyncEngine(core, started.info, config, counts)) as engine,
        watched_interpreter(config.step_timeout_s),
    ):
        parent.set_engine(engine)
        live = LiveRequests(counts, lambda name: parent.send(AbortEverywhere(name)))
        app = create_app(engine, tokenizer, options, tracing, live, cells)
        # Loaded objects live as long as the process. Freezing them keeps full garbage
        # collections from walking them, which would delay tokens.
        gc.collect()
        gc.freeze()
        background = _WorkerBackground(parent, engine, live)
        run_server(app, bound, background, partial(parent.send, WorkerReady()))
        engine.check_health()


def main(arguments: list[str]) -> int:
    """Run a worker on the given file descriptors; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    block_torch_import()
    faulthandler.enable(file=2)
    control, *others = map(int, arguments)
    listener, core, watch, shared = others
    connection = Connection(control)
    try:
        start: StartWorker = connection.recv()
    except (EOFError, OSError):
        return PARENT_GONE
    replace(start.log, worker=worker_name(start.number)).apply()
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    parent = Parent(connection)
    with queued_stderr():
        try:
            serve(start, parent, (listener, core, watch, shared))
        except EngineError as exc:  # its message says what to do; the parent reports it
            parent.send(Failed(type(exc).__name__, str(exc)))
            return 1
        except Exception as exc:
            logger.critical("API worker %d died", start.number, exc_info=exc)
            reason = f"the API worker {worker_name(start.number)} died: {exc!r}"
            parent.send(Failed(EngineDead.__name__, reason))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
