"""The parent process of an instance whose API is served by several worker processes.

Python's GIL lets only one thread at a time turn tokens into text and JSON; with several workers
(``--api-workers``) several processes do. Each worker serves the whole API. It has its own socket at
the instance's port, among which the kernel distributes connections (``SO_REUSEPORT``), and its own
connection to the one core. The parent serves no requests: it starts core and workers, forwards
messages that concern all workers, and stops them. If a worker or the core exits, the instance exits
with that reason, as in vLLM.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from types import FrameType

from mooncake_engine.config import EngineConfig
from mooncake_engine.core_client import CoreClient, error_of
from mooncake_engine.core_messages import Failed, LoadProgress, Started
from mooncake_engine.errors import ConfigError, EngineDead, EngineError
from mooncake_engine.process.worker_counts import COUNTS_BYTES, WorkerCounts
from mooncake_engine.server.api_server import (
    Draining,
    announce,
    bind,
    check_before_loading,
    num_held,
    url_of,
    with_api_port,
)
from mooncake_engine.server.metric_cells import cells_bytes
from mooncake_engine.server.registration import (
    Registration,
    registration_of,
)
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.server.stats_log import StatsLog
from mooncake_engine.step_watchdog import StepWatchdog
from mooncake_hal.command_line import LogSettings, describe_exit, import_path

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.1
_DRAIN_ACK_TIMEOUT_S = 1.0
"""Seconds that workers have to confirm that they reject new requests, before the instance may exit
without their confirmation."""
_EXIT_TIMEOUT_S = 8.0
"""Seconds that workers have to exit before they are killed: more than a worker may take to send the
end of its responses."""


_MAX_UNSENT_MESSAGES = 4096
"""Messages for a worker that does not read them; later ones are dropped."""
_WARN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class StartWorker:
    """The parent's first message to a worker.

    Args:
        number: the worker's number, from 0.
        config: the engine's configuration.
        options: the server's options.
        log: format and level of log lines; all processes log to the same standard error.
    """

    number: int
    config: EngineConfig
    options: ServerOptions
    log: LogSettings


@dataclass(frozen=True, slots=True)
class Serve:
    """Tells a worker that the core is ready: accept requests."""

    started: Started


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Tells the parent that a worker accepts requests."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Tells a worker to reject new requests."""


@dataclass(frozen=True, slots=True)
class DrainStarted:
    """Tells the parent that a worker rejects new requests: from now on its number of running
    requests can only fall."""


@dataclass(frozen=True, slots=True)
class AbortEverywhere:
    """Aborts the client requests with this id on every worker. Sent by the worker that received the
    abort, and forwarded by the parent to the others."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Tells a worker to fail the requests that still run and exit.

    Args:
        reason: why the engine died; empty if it did not.
    """

    reason: str = ""


class _Worker:
    """A worker process, as its parent sees it. Messages are sent by a thread: a worker that reads
    none, because it is frozen, does not hold up the parent and through it the other workers."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], control: Connection) -> None:
        self.name = name
        self.process = process
        self.control = control
        self.is_ready = False
        self.is_draining = False
        self._unsent: queue.Queue[object] = queue.Queue(_MAX_UNSENT_MESSAGES)
        self._num_dropped = 0
        self._warned_at = -_WARN_EVERY_S
        self._sender = threading.Thread(target=self._send_all, name=f"to-{name}", daemon=True)
        self._sender.start()

    def send(self, message: object) -> None:
        """Send a message. If the worker has exited, ``ApiWorkers.check`` reports it."""
        try:
            self._unsent.put_nowait(message)
        except queue.Full:
            self._num_dropped += 1
            now = time.monotonic()
            if now - self._warned_at >= _WARN_EVERY_S:
                self._warned_at = now
                logger.warning(
                    "%s reads no messages: dropped %s, %d in all",
                    self.name,
                    type(message).__name__,
                    self._num_dropped,
                )

    def close(self) -> None:
        """Close the connection. Call once the process has exited, so that nothing blocks."""
        self._unsent.put(None)
        self._sender.join()
        self.control.close()

    def _send_all(self) -> None:
        """Thread main: send the messages until there is None."""
        while (message := self._unsent.get()) is not None:
            try:
                self.control.send(message)
            except OSError:
                logger.debug("%s is gone", self.name)


class ApiWorkers:
    """The worker processes of an instance; closing it stops them.

    Args:
        start: the first message to each worker, which differs only in the number.
        listeners: one listening socket per worker.
        core: the client of the core that the workers share.
    """

    def __init__(
        self, start: StartWorker, listeners: Sequence[socket.socket], core: CoreClient
    ) -> None:
        shared = os.memfd_create("mooncake-api-workers")
        os.ftruncate(shared, COUNTS_BYTES + cells_bytes(len(listeners)))
        self._counts = WorkerCounts(mmap.mmap(shared, COUNTS_BYTES))
        self._workers: list[_Worker] = []
        with ExitStack() as cleanup:
            cleanup.callback(os.close, shared)
            unwind = cleanup.enter_context(ExitStack())
            unwind.callback(self.close)
            pairs = zip(listeners, core.for_workers, strict=True)
            for number, (listener, connection) in enumerate(pairs):
                self._start(number, (listener.fileno(), connection.fileno(), core.state, shared))
                connection.close()
                listener.close()
                self._workers[-1].send(replace(start, number=number))
            unwind.pop_all()

    def __len__(self) -> int:
        """The number of requests that clients of all workers are waiting for."""
        return self._counts.num_waiting

    @property
    def are_draining(self) -> bool:
        """Whether all workers reject new requests, so that the number of live requests can only
        fall."""
        return all(worker.is_draining for worker in self._workers)

    @property
    def are_ready(self) -> bool:
        """Whether all workers accept requests."""
        return all(worker.is_ready for worker in self._workers)

    def serve(self, started: Started) -> None:
        """Tell all workers that the core is ready, so that they accept requests."""
        self._broadcast(Serve(started))

    def drain(self) -> None:
        """Tell all workers to reject new requests."""
        self._broadcast(Drain())

    def check(self) -> None:
        """Process the messages that workers have sent.

        Raises:
            ConfigError, CheckpointError: a worker can't serve the configuration.
            EngineDead: a worker has exited.
        """
        for worker in self._workers:
            while worker.control.poll():
                self._handle_message(worker)

    def fileno_all(self) -> list[int]:
        """The descriptors that become readable when ``check`` has something to do."""
        return [worker.control.fileno() for worker in self._workers]

    def end(self, reason: str) -> None:
        """Tell all workers to fail their running requests with ``reason`` and exit."""
        self._broadcast(StopWorker(reason))

    def close(self) -> None:
        """Stop all workers and wait for them to exit; those that don't are killed. Idempotent."""
        self.end("")
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s has not exited in time and is killed", worker.name)
                worker.process.kill()
                worker.process.wait()
            worker.close()

    def _start(self, number: int, descriptors: tuple[int, ...]) -> None:
        ours, theirs = Pipe()
        passed = (theirs.fileno(), *descriptors)
        process = subprocess.Popen(
            [sys.executable, "-m", "mooncake_engine.server.api_worker", *map(str, passed)],
            pass_fds=passed,
            env={**os.environ, "PYTHONPATH": import_path()},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._workers.append(_Worker(worker_name(number), process, ours))

    def _broadcast(self, message: object) -> None:
        for worker in self._workers:
            worker.send(message)

    def _handle_message(self, worker: _Worker) -> None:
        try:
            message = worker.control.recv()
        except (EOFError, OSError):
            raise _exit_error(worker) from None
        if isinstance(message, WorkerReady):
            worker.is_ready = True
        elif isinstance(message, DrainStarted):
            worker.is_draining = True
        elif isinstance(message, AbortEverywhere):
            for other in self._workers:
                if other is not worker:
                    other.send(message)
        elif isinstance(message, Failed):
            raise error_of(message)


def worker_name(number: int) -> str:
    """The name of a worker in logs."""
    return f"api-{number}"


def _exit_error(worker: _Worker) -> EngineDead:
    try:
        status = worker.process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return EngineDead(f"the API worker {worker.name} closed its connection")
    return EngineDead(f"the API worker {worker.name} {describe_exit(status)}")


class _AllWorkersRequests:
    """The live requests of all workers, as ``Draining`` sees them. A signal handler may call
    ``close``, so ``close`` only sets a flag and sends nothing."""

    def __init__(self, workers: ApiWorkers) -> None:
        self._workers = workers
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._workers)

    def close(self) -> None:
        """Have the main loop tell the workers to reject new requests."""
        self.is_closed = True

    def fail_all(self) -> None:
        """Does nothing: the parent stops the workers next, and they fail what still runs."""


def bind_all(host: str, port: int, num_sockets: int) -> list[socket.socket]:
    """Bind several sockets to one port, among which the kernel distributes connections.

    Raises:
        PortInUse, ConfigError: see ``bind``.
    """
    first = bind(host, port)
    with ExitStack() as cleanup:
        cleanup.callback(first.close)
        sockets = [first]
        # Set after the first bind: with the option set, the bind would succeed even if another
        # instance of the same user already served this port.
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(num_sockets - 1):
            other = bind(host, first.getsockname()[1], shares_port=True)
            cleanup.callback(other.close)
            sockets.append(other)
        cleanup.pop_all()
    return sockets


def serve_with_workers(
    config: EngineConfig,
    host: str,
    port: int,
    options: ServerOptions,
    on_progress: Callable[[str, float], None],
) -> None:
    """Like ``api_server.serve``, with several processes that serve the API; raises the same errors.

    Args:
        on_progress: called while the model loads, with the phase and the fraction that is done.

    Raises:
        ConfigError: the options keep the core from having a process of its own.
    """
    if config.core_process is False:
        raise ConfigError(
            f"--api-workers {options.api_workers} needs the core in a process of its own: remove "
            "--no-core-process"
        )
    check_before_loading(config, host, options)
    listeners = bind_all(host, port, options.api_workers)
    port = listeners[0].getsockname()[1]
    config = with_api_port(config, port)
    with ExitStack() as cleanup:
        for listener in listeners:
            cleanup.callback(listener.close)
        core = cleanup.enter_context(closing(CoreClient(config, options.api_workers)))
        start = StartWorker(0, config, options, LogSettings.current())
        workers = cleanup.enter_context(closing(ApiWorkers(start, listeners, core)))
        url = url_of(host, port)
        registration = cleanup.enter_context(closing(registration_of(config.role, options, url)))
        instance = _Instance(core, workers, options, registration)
        try:
            instance.load(on_progress)
            logger.info("serving %s (%s) at %s", config.model_name, config.role.value, url)
            instance.run(url)
        except EngineError as exc:
            workers.end(str(exc))
            raise


class _Instance:
    """The main loop of the parent process: supervises core and workers while they load, serve and
    drain."""

    def __init__(
        self,
        core: CoreClient,
        workers: ApiWorkers,
        options: ServerOptions,
        registration: Registration,
    ) -> None:
        self._core = core
        self._registration = registration
        self._workers = workers
        self._requests = _AllWorkersRequests(workers)
        self._draining = Draining(options.shutdown_timeout_s, self._requests, self._num_held)
        self._stats_log = StatsLog(lambda: core.report().stats, options.log_stats_interval_s)
        self._stall: EngineDead | None = None

    def load(self, on_progress: Callable[[str, float], None]) -> None:
        """Wait until the core and then the workers are ready."""

        def report(progress: LoadProgress) -> None:
            on_progress("loading weights", progress.fraction)

        self._workers.serve(self._core.wait_started(report, self._workers.check))
        while not self._workers.are_ready:
            descriptors = [self._core.fileno(), *self._workers.fileno_all()]
            select.select(descriptors, [], [], _POLL_INTERVAL_S)
            self._receive_messages()

    def run(self, url: str) -> None:
        """Run until the instance has drained after a signal, or until core or a worker dies."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        readable = select.poll()
        for descriptor in (self._core.fileno(), *self._workers.fileno_all()):
            readable.register(descriptor, select.POLLIN)
        watchdog = StepWatchdog(self._core.watch, self._abandon_step)
        announce(f"ready {url}")
        self._registration.start()
        try:
            self._serve(readable)
        finally:
            watchdog.close()

    def _serve(self, readable: select.poll) -> None:
        drain_sent_at: float | None = None
        while True:
            readable.poll(_POLL_INTERVAL_S * 1e3)
            self._receive_messages()
            now = time.monotonic()
            if self._requests.is_closed and drain_sent_at is None:
                drain_sent_at = now
                self._registration.unregister()
                self._workers.drain()
            is_acknowledged = (
                self._workers.are_draining or now - (drain_sent_at or now) > _DRAIN_ACK_TIMEOUT_S
            )
            if is_acknowledged and self._draining.is_over(now):
                return
            self._stats_log.tick(now)

    def _receive_messages(self) -> None:
        """Process the messages that core and workers have sent."""
        try:
            if select.select([self._core], [], [], 0.0)[0]:
                self._core.step()
        except EngineDead as exc:
            raise self._stall or exc from None
        self._workers.check()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._draining.stop(time.monotonic())

    def _num_held(self) -> int:
        return num_held(self._core.report().stats)

    def _abandon_step(self) -> None:
        """Abandon a step that has not returned in time. Runs in the watchdog's thread."""
        # Set the reason first: the main loop notices the end of the core's process at once, and
        # would otherwise report that as the reason.
        self._stall = EngineDead(
            f"{self._core.watch.timeout_message()}; the core's process was ended"
        )
        self._core.abandon_step()
