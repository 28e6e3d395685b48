"""The thread that handles completions and deadlines of all peers of an endpoint."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from mooncake_hal.errors import TransferError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 3600.0


class ProgressThread:
    """Waits for completion events and deadlines, and calls the callbacks that handle them.

    Callbacks run on this thread and must not block. An exception from a callback is logged and
    passed to ``on_error``, which fails the affected transfers.

    Args:
        tick: handles deadlines; called when the next one is due. Returns the ``time.monotonic``
            value at which to call it next, or None.
        on_error: called with the exception of a failed callback.

    Raises:
        TransferError: the thread can't be started.
    """

    def __init__(
        self, tick: Callable[[float], float | None], on_error: Callable[[Exception], None]
    ) -> None:
        self._tick = tick
        self._on_error = on_error
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._poller = select.epoll()
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.register(self._wake_out, select.EPOLLIN)
        self._closing = False
        self._next = float("inf")
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rdma-progress", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._close_descriptors()
            raise TransferError(f"rdma: the progress thread can't be started: {exc}") from exc

    def add(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever ``fd`` is readable."""
        self._callbacks[fd] = callback
        self._poller.register(fd, select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Remove the callback of ``fd``; must be called before ``fd`` is closed."""
        if self._callbacks.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def wake_by(self, moment: float) -> None:
        """Call ``tick`` at the given ``time.monotonic`` value at the latest."""
        with self._lock:
            if moment >= self._next:
                return
            self._next = moment
        self._wake()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._poller.close()
        os.close(self._wake_out)
        os.close(self._wake_in)

    def _wake(self) -> None:
        try:
            os.write(self._wake_in, b"x")
        except BlockingIOError:
            return  # the pipe is full: the thread will wake anyway

    def _run(self) -> None:
        while not self._closing:
            wait = min(max(0.0, self._next - time.monotonic()), IDLE_SECONDS)
            for fd, _ in self._poller.poll(wait):
                self._call(fd)
            if time.monotonic() >= self._next:
                self._keep_deadlines()

    def _keep_deadlines(self) -> None:
        with self._lock:
            self._next = float("inf")
        try:
            moment = self._tick(time.monotonic())
        except Exception as exc:  # noqa: BLE001 - thread top: waiting transfers must fail with it
            self._fail(exc)
            return
        if moment is not None:
            with self._lock:
                self._next = min(self._next, moment)

    def _call(self, fd: int) -> None:
        if fd == self._wake_out:
            os.read(fd, 4096)
            return
        callback = self._callbacks.get(fd)
        if callback is None:
            return  # removed since the poll
        try:
            callback()
        except Exception as exc:  # noqa: BLE001 - thread top: waiting transfers must fail with it
            self._fail(exc)

    def _fail(self, error: Exception) -> None:
        logger.error("rdma progress failed", exc_info=error)
        self._on_error(error)


def is_readable(fd: int, seconds: float = 0.0) -> bool:
    """Wait until a descriptor is readable or the time has passed; returns whether it is
    readable."""
    poller = select.poll()  # select.select does not support descriptors above 1023
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
