"""The process of a core: ``python -m mooncake_engine.core_process WATCH CONNECTION WORKER...``.

Takes inherited descriptors: the memory in which others see how long a step has been running, a
connection to the process that started this one, and one to each API worker, if there are several.
The first connection's end means that the instance is gone: this process then exits at once,
whatever it is doing, and its ranks with it.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection

from mooncake_engine.assembly import RunningEngine, build_engine
from mooncake_engine.core_messages import (
    OTHER,
    UPDATES,
    AbortRequest,
    AddRequest,
    Ask,
    Command,
    Core,
    Failed,
    Message,
    ReadFigures,
    Reply,
    Report,
    Start,
    Started,
    Stop,
    Wake,
    encode_updates,
)
from mooncake_engine.errors import EngineDead, EngineError
from mooncake_engine.execution.rank_launcher import Rank, fork_local_ranks, has_local_ranks
from mooncake_engine.messages import FinishReason, TokenUpdate
from mooncake_engine.process.queued_stderr import queued_stderr
from mooncake_engine.step_watchdog import STATE_BYTES, StepWatch, StepWatchdog

logger = logging.getLogger(__name__)

PARENT_GONE = 3
"""Exit status of a core whose parent died."""

REPORT_PAUSE_S = 0.1
MAX_UNSENT_BYTES = 64 << 20
"""Of updates that one front end does not read, behind the message that it is being sent: at a
token's 60 bytes, a million of them. One message may have more: log probabilities of prompts do.
Last updates of its requests come on top, of which there are as many as may run and wait."""
BEHIND = (
    "the API process of this request reads tokens slower than they are made, and is too far behind"
)


class FrontEnd:
    """A process that serves requests, as the core sees it. Nothing waits for it: what it does not
    read at once is sent by a thread of its own.

    Args:
        connection: to it.
        name: of it, in words.
    """

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection = connection
        self.name = name
        self.reported: Report | None = None
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()  # messages; the first one may have begun
        self._num_waiting_bytes = 0  # of those behind the first
        self._is_gone = False

    def tell(self, message: Message) -> None:
        """Send anything but updates."""
        self.send(OTHER, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send(self, kind: int, encoded: bytes) -> None:
        """Send a message, as ``Connection.send_bytes`` frames it. Any thread."""
        frame = struct.pack("!iB", len(encoded) + 1, kind) + encoded
        with self._lock:
            if self._is_gone:
                return
            if not self._unsent:
                num_sent = self._try(frame)
                if num_sent < len(frame):
                    self._unsent.append(memoryview(frame)[num_sent:])
                    threading.Thread(target=self._flush, name="unsent", daemon=True).start()
                return
            self._unsent.append(memoryview(frame))
            self._num_waiting_bytes += len(frame)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many may be sent without too much waiting: what comes while nothing waits may
        be of any size."""
        waiting = self._num_waiting_bytes
        return not waiting or waiting + num_bytes <= MAX_UNSENT_BYTES

    def report(self, report: Report) -> None:
        """Send figures that have changed; not after others that wait yet."""
        if report != self.reported and not self._unsent:
            self.reported = report
            self.tell(report)

    def _try(self, data: bytes | memoryview) -> int:
        """Send what it takes now; returns how many bytes."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # whoever reads its end decides what that means
            self._is_gone = True
            return len(data)

    def _flush(self) -> None:
        """Top of a thread: send on until nothing waits."""
        writable = select.poll()
        writable.register(self._socket.fileno(), select.POLLOUT)
        while True:
            writable.poll()
            with self._lock:
                first = self._unsent[0]
                first = self._unsent[0] = first[self._try(first) :]
                if first:
                    continue
                self._unsent.popleft()
                if not self._unsent:
                    return
                self._num_waiting_bytes -= len(self._unsent[0])


class CoreProcess:
    """The core's side of its connections.

    Args:
        parent: the process that started this one. It serves requests itself if it is alone.
        workers: API workers.
        state: see ``StepWatch``.
    """

    def __init__(self, parent: FrontEnd, workers: Sequence[FrontEnd], state: mmap) -> None:
        self._parent = parent
        self._fronts = (parent, *workers)
        self._state = state
        self._core: Core | None = None
        self._stopping = threading.Event()
        self._served_by: dict[str, FrontEnd] = {}
        self._given_up: set[str] = set()  # requests that end for ``BEHIND``; the last update is due

    def run(self, start: Start, ranks: Sequence[Rank] = ()) -> None:
        """Load a model and step until told to stop.

        Args:
            start: what to load.
            ranks: its own, if they are forked already.

        Raises:
            EngineError: it can't be loaded, or it died.
        """
        orders = threading.Thread(target=self._take_orders, name="orders", daemon=True)
        orders.start()
        watch = StepWatch(start.config.step_timeout_s, self._state)
        engine = build_engine(start.config, self._parent.tell, watch, ranks)
        core = self._core = engine.core
        watchdog = StepWatchdog(watch, partial(self._give_up, core))
        try:
            self._begin(engine)
            while not self._stopping.is_set():
                if updates := core.step():
                    self._publish(core, updates)
        finally:
            watchdog.close()
            core.close()

    def fail(self, exc: BaseException) -> None:
        """Tell everybody why this process ends."""
        for front in self._fronts:
            front.tell(Failed(type(exc).__name__, str(exc)))

    def _begin(self, engine: RunningEngine) -> None:
        # what is loaded stays: full collections need not walk it while tokens wait
        gc.collect()
        gc.freeze()
        core = engine.core
        self._parent.tell(Started(engine.info, core.compiles_grammars, _report_of(core)))
        threading.Thread(target=self._report, args=(core,), name="reports", daemon=True).start()
        for number, front in enumerate(self._fronts[1:], start=1):
            name = f"requests-{number}"
            threading.Thread(target=self._serve, args=(core, front), name=name, daemon=True).start()

    def _publish(self, core: Core, updates: list[TokenUpdate]) -> None:
        """Send a step's updates to those who serve their requests."""
        batches = {self._parent: updates} if len(self._fronts) == 1 else self._by_front(updates)
        names = [update.request_id for update in updates if update.finish is not None]
        ended = {self._served_by.pop(name) for name in names}
        if ended:  # before a client knows that its request has ended, the figures have it
            report = _report_of(core)
            for front in ended:
                front.report(report)
        for front, batch in batches.items():
            encoded = encode_updates(batch)
            if not self._given_up and front.has_room(len(encoded)):
                front.send(UPDATES, encoded)
            else:
                self._publish_behind(core, front, batch)

    def _publish_behind(self, core: Core, front: FrontEnd, updates: list[TokenUpdate]) -> None:
        """Send updates to a front end that has no room for them, or had none. Requests whose tokens
        it can't be told end, with that as their last update; all others go on."""
        rest = [update for update in updates if update.request_id not in self._given_up]
        if rest and not front.has_room(len(encode_updates(rest))):
            logger.warning(
                "%s is more than %d MiB of tokens behind: %d of its requests end",
                *(front.name, MAX_UNSENT_BYTES >> 20, len(rest)),
            )
            for update in rest:
                self._given_up.add(update.request_id)
                core.post(AbortRequest(update.request_id))  # or what its end has left for a peer
            rest = []
        ended = {update.request_id for update in updates if update.finish is not None}
        ended &= self._given_up
        self._given_up -= ended
        rest += [TokenUpdate(name, finish=FinishReason.ERROR, error=BEHIND) for name in ended]
        if rest:
            front.send(UPDATES, encode_updates(rest))

    def _by_front(self, updates: list[TokenUpdate]) -> dict[FrontEnd, list[TokenUpdate]]:
        batches: dict[FrontEnd, list[TokenUpdate]] = defaultdict(list)
        for update in updates:
            batches[self._served_by[update.request_id]].append(update)
        return batches

    def _take_orders(self) -> None:
        """Top of a thread: act on what the parent says, until it is gone."""
        try:
            while True:
                order = pickle.loads(self._parent.connection.recv_bytes())
                core = self._core
                if core is None:
                    os._exit(0)  # told to stop while it loads: other orders come later
                if isinstance(order, Stop):
                    self._stopping.set()
                    core.post(Wake())
                else:
                    self._act(core, self._parent, order)
        except (EOFError, OSError):
            os._exit(PARENT_GONE)

    def _serve(self, core: Core, worker: FrontEnd) -> None:
        """Top of a thread: take an API worker's requests; the parent sees to it when it is gone."""
        try:
            while True:
                self._act(core, worker, pickle.loads(worker.connection.recv_bytes()))
        except (EOFError, OSError):
            logger.debug("%s has closed its connection", worker.name)

    def _act(self, core: Core, front: FrontEnd, order: Ask | Command) -> None:
        if isinstance(order, Ask) and isinstance(order.command, ReadFigures):
            front.report(_report_of(core))
            front.tell(Reply(order.number, True))
        elif isinstance(order, Ask):
            core.post(replace(order.command, reply=partial(self._reply, front, order.number)))
        else:
            if isinstance(order, AddRequest):
                self._served_by[order.request.request_id] = front
            core.post(order)

    @staticmethod
    def _reply(front: FrontEnd, number: int, value: bool) -> None:
        front.tell(Reply(number, value))

    def _report(self, core: Core) -> None:
        """Top of a thread."""
        while not self._stopping.wait(REPORT_PAUSE_S):
            report = _report_of(core)
            for front in self._fronts:
                front.report(report)

    def _give_up(self, core: Core) -> None:
        """A step has not returned in time; the watchdog's thread."""
        self.fail(core.abandon_step())


def _report_of(core: Core) -> Report:
    return Report(core.stats(), core.pairing(), core.topology(), core.kv_event_endpoints())


def main(arguments: list[str]) -> int:
    """Run a core on the file descriptors given; returns the exit status."""
    # a service manager's signals reach every process; when the core ends is the parent's decision
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable(file=2)
    state, *descriptors = map(int, arguments)
    parent, *workers = connections = [Connection(descriptor) for descriptor in descriptors]
    try:
        start: Start = pickle.loads(parent.recv_bytes())
    except (EOFError, OSError):
        return PARENT_GONE
    ranks: Sequence[Rank] = ()
    if has_local_ranks(start.config):  # now, as there is one thread yet
        ranks = fork_local_ranks(start.config.num_all_ranks, connections)
    with queued_stderr():
        process = CoreProcess(
            FrontEnd(parent, "the API server"),
            [FrontEnd(worker, f"API worker {number}") for number, worker in enumerate(workers, 1)],
            mmap(state, STATE_BYTES),
        )
        return serve(process, start, ranks)


def serve(process: CoreProcess, start: Start, ranks: Sequence[Rank]) -> int:
    """Be a core until told to stop; returns the exit status."""
    start.log.apply()
    try:
        process.run(start, ranks)
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
