"""Starts and supervises the proxy's worker processes (`--workers N`).

The parent forks them, relays their messages, restarts those that die and forwards signals. It
serves no requests itself.
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
from mooncake_proxy.errors import AddressInUse, ConfigError, cannot_listen
from mooncake_proxy.ops.background_stderr import background_stderr
from mooncake_proxy.ops.reloaded_files import LOOK_S, ReloadedFiles, with_current_keys
from mooncake_proxy.ops.worker_link import (
    MAX_MESSAGE_BYTES,
    ChangeLog,
    ChangeMessage,
    InstanceDeclared,
    WorkerExited,
    WorkerLink,
    decode_message,
    encode_message,
)


def describe_exit(status: int) -> str:
    """Describe a process's return code; a negative one is a signal's number."""
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
# Pause before a worker that has died is restarted.
RESTART_PAUSE_S = 1.0
# A worker that sends nothing for this long hangs: it sends its load twice a second. The kernel
# would go on to give it a share of all new connections.
HANG_S = 30.0
# Of the time between two looks at most this counts: the parent may have been stopped as well.
MAX_LOOK_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Exit statuses of a worker that can't serve as configured -> the proxy's own exit status.
CONFIG_EXIT_STATUSES = {os.EX_CONFIG: 2, os.EX_UNAVAILABLE: 1}
BUFFER_BYTES = 4 * 1024 * 1024

# Runs one worker to its end.
RunWorker = Callable[[ProxyConfig, WorkerLink], None]


class WorkerSupervisor:
    """Starts, restarts and stops the workers, and relays their messages.

    Args:
        config: the checked configuration of the proxy.
        run_worker: runs one worker to its end, in the forked process.
    """

    def __init__(self, config: ProxyConfig, run_worker: RunWorker) -> None:
        self._run_worker = run_worker
        # Bound but not listening: reserves the port while workers are restarted.
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
        # Seconds since the latest message of each worker that has sent one.
        self._silent_s: dict[int, float] = {}
        self._killed: set[int] = set()
        self._watched_at = time.monotonic()
        # Changes of the pool, for workers that start later or missed some.
        self._changes = ChangeLog()
        # Workers that missed messages, and for each the workers that have ended since.
        self._missed: dict[int, set[int]] = {}
        self._is_stopping = False
        self._is_reloading = False
        # For workers that start later; those that run look at the files themselves.
        files = self.config.key_files
        self._keys = ReloadedFiles("keys", (files.api, files.admin), self._read_keys, files.stamps)
        self._looked_at = time.monotonic()
        self._status = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run the workers until SIGINT or SIGTERM, or until one can't serve as configured.

        The latter counts only for the first workers: then none could serve.

        Returns:
            The exit status: 0 after a signal, 1 if a port is taken, 2 for another bad setting.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._note_reload)
        for _ in range(self.config.workers):
            self._start()
        while self._pids:
            for key, _ in self._selector.select(POLL_S):
                self._relay(key.data)
            self._kill_hung(time.monotonic())
            self._reap_workers()
            self._resend_missed()
            self._look_at_files()
        self._reserved.close()
        return self._status

    def _start(self) -> None:
        """Start a worker unless the proxy is stopping.

        Stop signals are blocked until its pid is known, so that they are forwarded to it.
        """
        held = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
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
        for message in self._changes.messages(time.monotonic()):
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
        """Run the forked child process; never returns."""
        status = 1
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            parents.close()
            for other in self._links.values():
                other.close()
            with background_stderr():  # a new one: threads do not survive a fork
                status = self._serve(worker, WorkerLink(worker, link))
        finally:
            logging.shutdown()
            os._exit(status)

    def _serve(self, worker: int, link: WorkerLink) -> int:
        """Run the worker and return its exit status."""
        try:
            self._run_worker(self.config, link)
        except ConfigError as exc:
            logger.error("worker %d can't serve: %s", worker, exc)  # noqa: TRY400  # no traceback
            return os.EX_UNAVAILABLE if isinstance(exc, AddressInUse) else os.EX_CONFIG
        except BaseException:
            logger.exception("worker %d failed", worker)
            return 1
        return 0

    def _relay(self, sender: int) -> None:
        """Forward a worker's message to all others."""
        try:
            data = self._links[sender].recv(MAX_MESSAGE_BYTES + 1)
        except (BlockingIOError, ConnectionError):
            return
        self._silent_s[sender] = 0.0
        message = decode_message(data) if data else None
        if isinstance(message, InstanceDeclared):
            self._changes.forget(message.name)
            return
        missed_by = self._send_to_others(sender, data)
        if isinstance(message, ChangeMessage):
            self._changes.note(message.change, time.monotonic())
            for worker in missed_by:
                self._missed.setdefault(worker, set())

    def _send_to_others(self, sender: int, data: bytes) -> list[int]:
        """Send a message to all other workers. Returns those that missed it."""
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

    def _publish_gone(self, ended: int) -> None:
        for worker in self._send_to_others(ended, encode_message(WorkerExited(ended))):
            self._missed.setdefault(worker, set()).add(ended)

    def _resend_missed(self) -> None:
        """Resend pool changes and ended workers to those that missed them: nobody else would."""
        for worker, ended in tuple(self._missed.items()):
            messages = [*self._changes.messages(time.monotonic()), *map(WorkerExited, ended)]
            try:
                for message in messages:
                    self._links[worker].send(encode_message(message))
            except OSError:
                continue  # its socket buffer is still full
            del self._missed[worker]

    def _kill_hung(self, now: float) -> None:
        """Kill workers that have been silent for too long at monotonic time `now`."""
        passed_s, self._watched_at = min(now - self._watched_at, MAX_LOOK_S), now
        for worker, pid in self._pids.items():
            if worker not in self._silent_s:
                continue  # it is starting
            self._silent_s[worker] += passed_s
            if self._silent_s[worker] >= HANG_S:
                del self._silent_s[worker]
                self._killed.add(worker)
                logger.error("worker %d hangs: it is killed, with its requests", worker)
                os.kill(pid, signal.SIGKILL)

    def _reap_workers(self) -> None:
        """Reap ended workers, and start new ones unless the proxy is stopping."""
        for worker, pid in tuple(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self._pids[worker]
            link = self._links.pop(worker)
            self._selector.unregister(link)
            link.close()
            self._missed.pop(worker, None)
            self._silent_s.pop(worker, None)
            self._publish_gone(worker)
            code = os.waitstatus_to_exitcode(status)
            # A later worker may fail because a file is missing for a while: keep restarting it.
            is_first = worker < self.config.workers
            if is_first and code in CONFIG_EXIT_STATUSES and not self._is_stopping:
                self._status = CONFIG_EXIT_STATUSES[code]
                self._stop(signal.SIGTERM, None)
            if not self._is_stopping:
                how = "killed as it hung" if worker in self._killed else describe_exit(code)
                logger.error("worker %d died, %s: starting a new one", worker, how)
                time.sleep(RESTART_PAUSE_S)
                self._start()

    def _note_reload(self, number: int, frame: object) -> None:
        self._is_reloading = True

    def _look_at_files(self) -> None:
        if self._is_reloading:
            self._is_reloading = False
            self._keys.reload()
            for pid in self._pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGHUP)
        elif time.monotonic() - self._looked_at > LOOK_S:
            self._looked_at = time.monotonic()
            self._keys.look()

    def _read_keys(self) -> None:
        self.config = with_current_keys(self.config)

    def _stop(self, number: int, frame: object) -> None:
        self._is_stopping = True
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _reserve(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Probe without REUSEPORT first, to notice another program on this port.
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = probe.getsockname()[1]
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Set while it binds, as connections in TIME_WAIT of a predecessor without workers would
        # keep the port for a minute. If it stayed, any program could share the port until the
        # workers listen.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as exc:
        reserved.close()
        raise cannot_listen(host, port, exc) from exc
    return reserved
