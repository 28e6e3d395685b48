"""The process of a core: ``python -m mooncake_engine.core_process CONNECTION WATCH``.

Takes two inherited descriptors: a connection to the process that serves requests, and the memory in
which that one sees how long a step has been running. The connection's end means that the other
process is gone: this one then exits at once, whatever it is doing, and its ranks with it.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection

from mooncake_engine.assembly import RunningEngine, build_engine
from mooncake_engine.core import EngineCore, Wake
from mooncake_engine.core_client import (
    OTHER,
    UPDATES,
    Ask,
    Failed,
    Message,
    Reply,
    Report,
    Start,
    Started,
    Stop,
    encode_updates,
)
from mooncake_engine.errors import EngineDead, EngineError
from mooncake_engine.messages import TokenUpdate
from mooncake_engine.process.queued_stderr import queued_stderr
from mooncake_engine.step_watchdog import STATE_BYTES, StepWatch, StepWatchdog

logger = logging.getLogger(__name__)

PARENT_GONE = 3
"""Exit status of a core whose parent died."""

REPORT_PAUSE_S = 0.1


class CoreProcess:
    """The core's side of the connection.

    Args:
        connection: to the process that serves requests.
        state: see ``StepWatch``.
    """

    def __init__(self, connection: Connection, state: mmap) -> None:
        self._connection = connection
        self._state = state
        self._lock = threading.Lock()
        self._core: EngineCore | None = None
        self._stopping = threading.Event()
        self._reported: Report | None = None

    def run(self, start: Start) -> None:
        """Load a model and step until told to stop.

        Raises:
            EngineError: it can't be loaded, or it died.
        """
        threading.Thread(target=self._receive, name="orders", daemon=True).start()
        watch = StepWatch(start.config.step_timeout_s, self._state)
        engine = build_engine(start.config, self._tell, watch)
        core = self._core = engine.core
        watchdog = StepWatchdog(watch, partial(self._give_up, core))
        try:
            self._begin(engine)
            threading.Thread(target=self._report, args=(core,), name="reports", daemon=True).start()
            while not self._stopping.is_set():
                if updates := core.step():
                    self._publish(core, updates)
        finally:
            watchdog.close()
            core.close()

    def fail(self, exc: BaseException) -> None:
        """Tell the parent why this process ends."""
        self._tell(Failed(type(exc).__name__, str(exc)))

    def _begin(self, engine: RunningEngine) -> None:
        # what is loaded stays: full collections need not walk it while tokens wait
        gc.collect()
        gc.freeze()
        core = engine.core
        self._tell(Started(engine.info, core.compiles_grammars, _report_of(core)))

    def _publish(self, core: EngineCore, updates: list[TokenUpdate]) -> None:
        # before a client knows that its request has ended, the figures have it
        if any(update.finish is not None for update in updates):
            self._tell_report(core)
        self._send(UPDATES, encode_updates(updates))

    def _receive(self) -> None:
        """Top of a thread: post what comes, until the parent is gone. Commands come once the parent
        has been told that there is a core."""
        try:
            while True:
                order = pickle.loads(self._connection.recv_bytes())
                core = self._core
                if core is None:
                    os._exit(0)  # told to stop while it loads
                if isinstance(order, Stop):
                    self._stopping.set()
                    core.post(Wake())
                elif isinstance(order, Ask):
                    core.post(replace(order.command, reply=partial(self._reply, order.number)))
                else:
                    core.post(order)
        except (EOFError, OSError):
            os._exit(PARENT_GONE)

    def _reply(self, number: int, value: bool) -> None:
        self._tell(Reply(number, value))

    def _report(self, core: EngineCore) -> None:
        """Top of a thread."""
        while not self._stopping.wait(REPORT_PAUSE_S):
            self._tell_report(core)

    def _tell_report(self, core: EngineCore) -> None:
        report = _report_of(core)
        if report != self._reported:
            self._reported = report
            self._tell(report)

    def _give_up(self, core: EngineCore) -> None:
        """A step has not returned in time; the watchdog's thread."""
        self.fail(core.abandon_step())

    def _tell(self, message: Message) -> None:
        self._send(OTHER, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _send(self, kind: int, encoded: bytes) -> None:
        try:
            with self._lock:
                self._connection.send_bytes(bytes((kind,)) + encoded)
        except OSError:
            os._exit(PARENT_GONE)


def _report_of(core: EngineCore) -> Report:
    return Report(core.stats(), core.pairing(), core.topology(), core.kv_event_endpoints())


def main(arguments: list[str]) -> int:
    """Run a core on the two file descriptors given; returns the exit status."""
    # a service manager's signals reach every process; when the core ends is the parent's decision
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable(file=2)
    descriptor, state = map(int, arguments)
    connection = Connection(descriptor)
    with queued_stderr():
        return serve(CoreProcess(connection, mmap(state, STATE_BYTES)), connection)


def serve(process: CoreProcess, connection: Connection) -> int:
    """Be a core until told to stop; returns the exit status."""
    try:
        start: Start = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):
        return PARENT_GONE
    start.log.apply()
    try:
        process.run(start)
    except EngineError as exc:  # says itself what to do: the parent shows it
        process.fail(exc)
        return 1
    except Exception as exc:
        logger.critical("the engine died: %s", exc, exc_info=exc)
        process.fail(
            exc if isinstance(exc, EngineDead) else EngineDead(f"the engine died: {exc!r}")
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
