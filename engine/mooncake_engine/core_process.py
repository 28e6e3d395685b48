"""Main of a core's process: ``python -m mooncake_engine.core_process WATCH CONNECTION WORKER...``.

The arguments are inherited file descriptors: shared memory in which other processes see how long a
step has been running, a connection to the parent process, and one to each API worker, if any. If
the parent's connection ends, the instance is gone: this process then exits at once, whatever it is
doing, and its ranks with it.
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from mmap import mmap
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from mooncake_engine.core_messages import (
    OTHER,
    UPDATES,
    AbortRequest,
    AddRequest,
    Ask,
    Command,
    Core,
    CoreReport,
    Failed,
    Message,
    PromptDecoder,
    RefreshReport,
    Reply,
    RequestWithoutPrompt,
    Start,
    Started,
    Stop,
    Wake,
    encode_updates,
)
from mooncake_engine.errors import EngineDead, EngineError
from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.process.message_sender import MessageSender
from mooncake_engine.process.queued_stderr import queued_stderr
from mooncake_engine.step_watchdog import STATE_BYTES, StepWatch, StepWatchdog
from mooncake_hal.command_line import collector_paused

if TYPE_CHECKING:
    from mooncake_engine.assembly import RunningEngine
    from mooncake_engine.execution.rank_launcher import Rank

logger = logging.getLogger(__name__)

PARENT_GONE = 3
"""Exit status of a core whose parent died."""

REPORT_INTERVAL_S = 0.1
"""Seconds between two reports."""
MAX_UNSENT_BYTES = 64 << 20
"""Maximum bytes of updates queued for one front end that does not read them, behind the message
that is being sent: a million tokens of 60 bytes each. A single message may be larger, for example
log probabilities of prompts. The last updates of requests come on top: at most one per request that
may run or wait."""
BEHIND = (
    "the API process of this request reads tokens more slowly than the engine generates them, and "
    "has fallen too far behind"
)
"""Error of requests whose updates were dropped."""


def encode_message(message: Message) -> bytes:
    """Encode a message other than updates."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def send_report(report: CoreReport, fronts: Iterable[FrontEnd]) -> None:
    """Send a report to front ends, and encode it once at most: loads of experts make it large."""
    encode = cache(partial(encode_message, report))
    for front in fronts:
        front.send_report(report, encode)


class FrontEnd(MessageSender):
    """The core's connection to a process that serves requests.

    Args:
        connection: connection to the process.
        name: name of the process in log lines.

    Attributes:
        reported: the last report that was sent.
        prompts: completes the requests that arrive.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        super().__init__(connection)
        self.connection = connection
        self.name = name
        self.reported: CoreReport | None = None
        self.prompts = PromptDecoder()

    def send_message(self, message: Message) -> None:
        """Send a message other than updates."""
        self.send(OTHER, encode_message(message))

    def send(self, kind: int, encoded: bytes) -> None:
        """Send a message of this kind. Any thread."""
        self.send_bytes(bytes((kind,)), encoded)

    def can_queue(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more may be queued. If nothing is queued, any size may."""
        waiting = self._num_queued_bytes
        return not waiting or waiting + num_bytes <= MAX_UNSENT_BYTES

    def send_report(self, report: CoreReport, encoded: Callable[[], bytes]) -> None:
        """Send a report if it has changed and no other message is still unsent.

        Args:
            report: the report.
            encoded: returns it encoded.
        """
        if report != self.reported and not self._unsent:
            self.reported = report
            self.send(OTHER, encoded())


class CoreProcess:
    """Runs a core and serves its connections; one per core process.

    Args:
        parent: the parent process, which serves requests itself if there are no API workers.
        workers: the API workers.
        state: shared memory of the watchdog; see ``StepWatch``.
    """

    def __init__(self, parent: FrontEnd, workers: Sequence[FrontEnd], state: mmap) -> None:
        self._parent = parent
        self._fronts = (parent, *workers)
        self._state = state
        self._core: Core | None = None
        self._stopping = threading.Event()
        self._report_lock = threading.Lock()
        self._failure: EngineDead | None = None
        self._served_by: dict[str, FrontEnd] = {}
        self._dropped: set[str] = set()  # ended because of ``BEHIND``; last update pending

    def run(self, start: Start, ranks: Sequence[Rank] = ()) -> None:
        """Load the model and run steps until the parent sends ``Stop``.

        Args:
            start: config and log settings.
            ranks: the ranks, if they have been forked already.

        Raises:
            EngineError: the model can't be loaded, or the engine died.
        """
        with collector_paused():
            from mooncake_engine.assembly import build_engine

        self._start_thread("parent", self._handle_parent)
        watch = StepWatch(start.config.step_timeout_s, self._state)
        engine = build_engine(start.config, self._parent.send_message, watch, ranks)
        core = self._core = engine.core
        watchdog = StepWatchdog(watch, partial(self._give_up, core))
        try:
            self._begin(engine)
            while not self._stopping.is_set():
                if updates := core.step():
                    self._publish(core, updates)
            if self._failure is not None:
                raise self._failure
        finally:
            watchdog.close()
            core.close()

    def fail(self, exc: BaseException) -> None:
        """Report to all front ends why this process ends."""
        for front in self._fronts:
            front.send_message(Failed(type(exc).__name__, str(exc)))

    def _begin(self, engine: RunningEngine) -> None:
        # what is loaded is never freed, so full collections need not traverse it and delay tokens
        gc.collect()
        gc.freeze()
        core = engine.core
        self._parent.send_message(Started(engine.info, core.compiles_grammars, core.report()))
        self._start_thread("reports", self._report, core)
        for number, front in enumerate(self._fronts[1:], start=1):
            self._start_thread(f"requests-{number}", self._handle_worker, core, front)

    def _start_thread(self, name: str, work: Callable[..., None], *args: object) -> None:
        threading.Thread(target=self._guard, args=(work, *args), name=name, daemon=True).start()

    def _guard(self, work: Callable[..., None], *args: object) -> None:
        """Thread main: do the work; if it fails, the core ends as if a step had failed."""
        try:
            work(*args)
        except Exception as exc:
            logger.critical("the engine died: %s", exc, exc_info=exc)
            self._failure = EngineDead(f"the engine died: {exc!r}")
            self._stopping.set()
            if self._core is not None:
                self._core.post(Wake())

    def _publish(self, core: Core, updates: list[TokenUpdate]) -> None:
        """Send a step's updates to the front ends that serve the requests."""
        batches = {self._parent: updates} if len(self._fronts) == 1 else self._by_front(updates)
        finished = [update.request_id for update in updates if update.finish is not None]
        ended = {self._served_by.pop(name) for name in finished}
        if ended:  # the report includes a finished request before its client sees the end
            self._send_report(core, ended)
        for front, batch in batches.items():
            encoded = encode_updates(batch)
            if not self._dropped and front.can_queue(len(encoded)):
                front.send(UPDATES, encoded)
            else:
                self._publish_lagging(core, front, batch)

    def _publish_lagging(self, core: Core, front: FrontEnd, updates: list[TokenUpdate]) -> None:
        """Send updates to a front end that is too far behind, or while some are. Requests whose
        updates are dropped end, and their last update says why; other requests continue."""
        rest = [update for update in updates if update.request_id not in self._dropped]
        if rest and not front.can_queue(len(encode_updates(rest))):
            logger.warning(
                "%s is more than %d MiB of tokens behind: ending %d of its requests",
                front.name,
                MAX_UNSENT_BYTES >> 20,
                len(rest),
            )
            for update in rest:
                self._dropped.add(update.request_id)
                core.post(AbortRequest(update.request_id))  # or its lease, if it has just finished
            rest = []
        ended = {update.request_id for update in updates if update.finish is not None}
        ended &= self._dropped
        self._dropped -= ended
        rest += [TokenUpdate(name, finish=FinishReason.ERROR, error=BEHIND) for name in ended]
        if rest:
            front.send(UPDATES, encode_updates(rest))

    def _by_front(self, updates: list[TokenUpdate]) -> dict[FrontEnd, list[TokenUpdate]]:
        batches: dict[FrontEnd, list[TokenUpdate]] = defaultdict(list)
        for update in updates:
            batches[self._served_by[update.request_id]].append(update)
        return batches

    def _handle_parent(self) -> None:
        """Thread main: handle the parent's messages until it is gone."""
        while True:
            try:
                encoded = self._parent.connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(PARENT_GONE)
            core = self._core
            if core is None:
                os._exit(0)  # must be Stop: the parent sends nothing else during loading
            message = pickle.loads(encoded)
            if isinstance(message, Stop):
                self._stopping.set()
                core.post(Wake())
            else:
                self._handle_message(core, self._parent, message)

    def _handle_worker(self, core: Core, worker: FrontEnd) -> None:
        """Thread main: handle an API worker's messages. The parent handles the worker's exit."""
        while True:
            try:
                encoded = worker.connection.recv_bytes()
            except (EOFError, OSError):
                logger.debug("%s has closed its connection", worker.name)
                return
            self._handle_message(core, worker, pickle.loads(encoded))

    def _handle_message(
        self, core: Core, front: FrontEnd, message: Ask | RequestWithoutPrompt | Command
    ) -> None:
        if isinstance(message, Ask) and isinstance(message.command, RefreshReport):
            self._send_report(core, [front])
            front.send_message(Reply(message.number, True))
        elif isinstance(message, Ask):
            core.post(replace(message.command, reply=partial(self._reply, front, message.number)))
        else:
            if isinstance(message, RequestWithoutPrompt):
                message = AddRequest(front.prompts.complete(message))
                self._served_by[message.request.request_id] = front
            core.post(message)

    @staticmethod
    def _reply(front: FrontEnd, number: int, value: bool) -> None:
        front.send_message(Reply(number, value))

    def _send_report(self, core: Core, fronts: Iterable[FrontEnd]) -> None:
        """Send a report to front ends. Any thread."""
        with self._report_lock:  # or an older report might follow a newer one
            send_report(core.report(), fronts)

    def _report(self, core: Core) -> None:
        """Thread main: send changed reports to all front ends."""
        while not self._stopping.wait(REPORT_INTERVAL_S):
            self._send_report(core, self._fronts)

    def _give_up(self, core: Core) -> None:
        """Give up a step that has timed out. Called on the watchdog's thread."""
        self.fail(core.abandon_step())


def main(arguments: list[str]) -> int:
    """Run a core on the given file descriptors; returns the exit status."""
    # a service manager's signals reach every process, but the parent decides when the core ends
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable(file=2)
    state, *descriptors = map(int, arguments)
    parent, *workers = connections = [Connection(descriptor) for descriptor in descriptors]
    try:
        start: Start = pickle.loads(parent.recv_bytes())
    except (EOFError, OSError):
        return PARENT_GONE
    with collector_paused():
        from mooncake_engine.execution.rank_launcher import (  # torch, for the ranks, too
            fork_local_ranks,
            has_local_ranks,
        )
    ranks: Sequence[Rank] = ()
    if has_local_ranks(start.config):  # fork now, while this process has a single thread
        ranks = fork_local_ranks(start.config.num_all_ranks, connections)
    with queued_stderr():
        process = CoreProcess(
            FrontEnd(parent, "the API server"),
            [FrontEnd(worker, f"API worker {number}") for number, worker in enumerate(workers, 1)],
            mmap(state, STATE_BYTES),
        )
        return serve(process, start, ranks)


def serve(process: CoreProcess, start: Start, ranks: Sequence[Rank]) -> int:
    """Run the core until it is stopped or fails; returns the exit status."""
    start.log.apply()
    try:
        process.run(start, ranks)
    except EngineError as exc:  # its message says what to do; the parent shows it
        process.fail(exc)
        return 1
    except Exception as exc:
        logger.critical("the engine died: %s", exc, exc_info=exc)
        process.fail(EngineDead(f"the engine died: {exc!r}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
