"""Starts and supervises the proxy's worker processes (``--workers N``).

The parent starts them, forwards their messages to each other, restarts dead ones and passes
signals on.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import AddressTaken, ConfigError, cannot_listen
from mooncake_proxy.ops.background_stderr import background_stderr
from mooncake_proxy.ops.worker_link import (
    MAX_MESSAGE_BYTES,
    ChangeLog,
    ChangeMessage,
    WorkerGone,
    WorkerLink,
    decode_message,
    encode_message,
)


def describe_exit(status: int) -> str:
    """What a return code of a process means; a negative one is a signal's number."""
    if status >= 0:
        return f"exited with status {status}"
    if -status == signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out: see dmesg"
    return f"killed by {_signal_name(-status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


logger = logging.getLogger(__name__)
POLL_S = 0.2
# A worker that dies sooner than this after its start is not started again at once.
RESTART_PAUSE_S = 1.0
STOPS = (signal.SIGINT, signal.SIGTERM)
# How a worker ends that can't serve what is configured, and the proxy's own status for it.
UNUSABLE = {os.EX_CONFIG: 2, os.EX_UNAVAILABLE: 1}
BUFFER_BYTES = 4 * 1024 * 1024

# Runs one worker to its end.
RunWorker = Callable[[ProxyConfig, WorkerLink], None]


class WorkerSupervisor:
    """Starts and restarts the workers. Serves no request itself."""

    def __init__(self, config: ProxyConfig, run_worker: RunWorker) -> None:
        self._run_worker = run_worker
        # Bound but not listening: the port stays ours while workers come and go.
        self._reserved = _reserve(config.host, config.port)
        running = math.ceil(config.admission.max_running / config.workers)
        self.config = replace(
            config,
            port=self._reserved.getsockname()[1],
            admission=replace(config.admission, max_running=running),
        )
        self._links: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        self._num_started = 0
        # For workers that are started later, or have missed something.
        self._changes = ChangeLog()
        # Workers that did not read in time, and who has ended since.
        self._behind: dict[int, set[int]] = {}
        self._is_stopping = False
        self._status = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Until SIGINT or SIGTERM: 0. Until one of the first workers can't serve as configured,
        which none can then: 1 for a port that is taken, else 2."""
        for number in STOPS:
            signal.signal(number, self._stop)
        for _ in range(self.config.workers):
            self._start()
        while self._pids:
            for key, _ in self._selector.select(POLL_S):
                self._relay(key.data)
            self._reap_workers()
            self._catch_up()
        self._reserved.close()
        return self._status

    def _start(self) -> None:
        """Start a worker unless the proxy stops. Stop signals are held until its pid is known, so
        that it gets them too."""
        held = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            if not self._is_stopping:
                self._fork()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def _fork(self) -> None:
        worker = self._num_started
        self._num_started += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        ours.setblocking(False)
        for message in self._changes.messages():
            try:
                ours.send(encode_message(message))
            except OSError as exc:
                logger.warning("worker %d misses earlier changes: %s", worker, exc)
        pid = os.fork()
        if pid == 0:
            self._run_child(worker, theirs, ours)
        theirs.close()
        self._links[worker] = ours
        self._pids[worker] = pid
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _run_child(self, worker: int, link: socket.socket, parents: socket.socket) -> None:
        """The child's whole life; never returns."""
        status = 1
        try:
            for number in STOPS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            parents.close()
            for other in self._links.values():
                other.close()
            with background_stderr():  # of its own: threads end where a process forks
                status = self._serve(worker, WorkerLink(worker, link))
        finally:
            logging.shutdown()
            os._exit(status)

    def _serve(self, worker: int, link: WorkerLink) -> int:
        """Run the child's part; its exit status."""
        try:
            self._run_worker(self.config, link)
        except ConfigError as exc:
            logger.error("worker %d can't serve: %s", worker, exc)  # noqa: TRY400  # that says all
            return os.EX_UNAVAILABLE if isinstance(exc, AddressTaken) else os.EX_CONFIG
        except BaseException:
            logger.exception("worker %d failed", worker)
            return 1
        return 0

    def _relay(self, sender: int) -> None:
        """Forward one message of a worker to all others."""
        try:
            data = self._links[sender].recv(MAX_MESSAGE_BYTES + 1)
        except (BlockingIOError, ConnectionError):
            return
        message = decode_message(data) if data else None
        missed_by = self._send_to_others(sender, data)
        if isinstance(message, ChangeMessage):
            self._changes.note(message.change)
            for worker in missed_by:
                self._behind.setdefault(worker, set())

    def _send_to_others(self, sender: int, data: bytes) -> list[int]:
        """Returns who misses it."""
        missed_by = []
        for worker, link in self._links.items():
            if worker == sender:
                continue
            try:
                link.send(data)
            except OSError as exc:
                logger.warning("cannot send to worker %d: %s", worker, exc)
                missed_by.append(worker)
        return missed_by

    def _tell_gone(self, ended: int) -> None:
        for worker in self._send_to_others(ended, encode_message(WorkerGone(ended))):
            self._behind.setdefault(worker, set()).add(ended)

    def _catch_up(self) -> None:
        """Tell who has missed changes of the pool, or that a worker ended: nothing else does."""
        for worker, ended in tuple(self._behind.items()):
            messages = [*self._changes.messages(), *map(WorkerGone, ended)]
            try:
                for message in messages:
                    self._links[worker].send(encode_message(message))
            except OSError:
                continue  # it does not read yet
            del self._behind[worker]

    def _reap_workers(self) -> None:
        """Reap ended workers; start new ones unless the proxy stops."""
        for worker, pid in tuple(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self._pids[worker]
            link = self._links.pop(worker)
            self._selector.unregister(link)
            link.close()
            self._behind.pop(worker, None)
            self._tell_gone(worker)
            code = os.waitstatus_to_exitcode(status)
            is_first = worker < self.config.workers  # later ones find files that may come back
            if is_first and code in UNUSABLE and not self._is_stopping:
                self._status = UNUSABLE[code]
                self._stop(signal.SIGTERM, None)
            if not self._is_stopping:
                how = describe_exit(code)
                logger.error("worker %d died, %s: starting a new one", worker, how)
                time.sleep(RESTART_PAUSE_S)
                self._start()

    def _stop(self, number: int, frame: object) -> None:
        self._is_stopping = True
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _reserve(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without REUSEPORT first: another program on this port must be noticed.
        probe = socket.socket(family, socket.SOCK_STREAM)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        port = probe.getsockname()[1]
        probe.close()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, port))
    except OSError as exc:
        raise cannot_listen(host, port, exc) from exc
    return reserved
