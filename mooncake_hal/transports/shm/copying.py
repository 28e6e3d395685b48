"""Transfers that are copies, and the threads of an endpoint that carry them out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mooncake_hal.errors import TransferCancelled, TransferError
from mooncake_hal.transports.shm.copier import Copier, Job, Outcome
from mooncake_hal.transports.transfers import PendingTransfer, deadline_after


@dataclass(frozen=True, slots=True)
class CopyHooks:
    """What a copy needs from the peer that it belongs to.

    Args:
        explain: turns the errno of a failed copy into an error.
        verify: called when all is copied; an error if the peer was gone by then.
        ended: called once, when the copy has ended.
    """

    explain: Callable[[int], TransferError]
    verify: Callable[[], TransferError | None]
    ended: Callable[[Copy], object]


class Copy(PendingTransfer):
    """A transfer that any number of workers carry out together; see ``Transfer``.

    Args:
        timeout: seconds for all of it, from now.
        local_keys: regions of this side that it touches.
        hooks: see there.
    """

    def __init__(self, timeout: float, local_keys: frozenset[int], hooks: CopyHooks) -> None:
        super().__init__(deadline_after(timeout))
        self.local_keys = local_keys
        self.remote_keys: frozenset[int] = frozenset()
        self._hooks = hooks
        self._job: Job | None = None
        self._inside = 0

    def begin(self, job: Job, remote_keys: frozenset[int]) -> None:
        """Say what to copy; nothing moves if it has been aborted before."""
        with self._lock:
            self.remote_keys = remote_keys
            self._job = job
            if self._error is not None:
                job.stop = 1

    def fail(self, error: TransferError) -> None:
        """End it before anything was copied."""
        with self._lock:
            self._error = self._error or error
        self._end()

    def abort(self, error: TransferError) -> None:
        """See ``PendingTransfer``."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = self._error or error
            if self._job is not None:
                self._job.stop = 1
            idle = self._inside == 0
        if idle:
            self._end()
        self._ended.wait()

    def run(self, copier: Copier) -> None:
        """Take part in it for as long as there is something left to copy."""
        with self._lock:
            job = self._job
            if self._ended.is_set() or job is None:
                return
            self._inside += 1
        outcome = copier.run(job)
        error = self._judge(outcome)
        with self._lock:
            self._inside -= 1
            self._error = self._error or error
            if self._error is not None:
                job.stop = 1
            last = self._inside == 0
        if last:
            self._end()

    def _judge(self, outcome: int) -> TransferError | None:
        if outcome == Outcome.DONE:
            return self._hooks.verify()
        if outcome == Outcome.STOPPED:
            return TransferCancelled("stopped by this side")
        return self.late() if outcome == Outcome.LATE else self._hooks.explain(outcome)

    def _end(self) -> None:
        self._hooks.ended(self)
        self._ended.set()


class Workers:
    """A few threads that carry out tasks in the order in which they were given.

    Args:
        count: how many.
        name: of the threads.
        copier: what they copy with.
    """

    def __init__(self, count: int, name: str, copier: Copier) -> None:
        self.copier = copier
        self.error: BaseException | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def share(self, copy: Copy) -> None:
        """Let every worker take part in a copy."""
        for _ in self._threads:
            self._tasks.put(lambda: copy.run(self.copier))

    def call(self, task: Callable[[], None]) -> None:
        """Let one worker call ``task``."""
        self._tasks.put(task)

    def close(self) -> None:
        """Let them finish what was given, and join them; idempotent."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as exc:  # noqa: BLE001  thread top: kept, raised by the next transfer
                self.error = self.error or exc
