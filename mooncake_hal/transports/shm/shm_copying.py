"""Copying between two processes' memory: by call or by mapping, and the threads that do it."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_hal import native
from mooncake_hal.errors import NativeUnavailable, TransferCancelled, TransferError
from mooncake_hal.transport import Spans
from mooncake_hal.transports.spans import call_vectors, vectors
from mooncake_hal.transports.transfers import PendingTransfer, deadline_after

CHUNK_BYTES = 4 << 20
STREAMING_BYTES = 8 << 20
"""From how many bytes on a copy bypasses the caches. To memory that no cache holds it is 1.5 times
as fast as memcpy then, and still ahead when all of it is read at once; where caches hold it, as
where a benchmark repeats itself, it is no slower from here on."""


class CopyMethod(IntEnum):
    """How the peer's bytes are reached."""

    MAPPING = 0
    CALL = 1


class Streaming(IntEnum):
    """Whether a copy bypasses the caches, and how."""

    CACHED = 0
    STREAMED = 1
    """As is the fastest on this CPU."""
    STREAMED_BY_PAGES = 2
    """Several pages at a time, whatever the CPU."""


class CopyOutcome(IntEnum):
    """How a worker's run over a job ended; positive values are errno numbers."""

    DONE = 0
    STOPPED = -1
    LATE = -2


class Job(ctypes.Structure):
    """One copy, shared by the workers that carry it out; laid out as in copy.c."""

    _fields_ = (
        ("local", ctypes.c_uint64),
        ("remote", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("next", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_int64),
        ("lock", ctypes.c_int32),
        ("stop", ctypes.c_int32),
        ("pid", ctypes.c_int32),
        ("method", ctypes.c_int32),
        ("write", ctypes.c_int32),
        ("streaming", ctypes.c_int32),
    )
    spans: Spans
    mutex: threading.Lock
    chunks: Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]


def make_job(spans: Spans, *, pid: int, method: CopyMethod, write: bool, deadline: float) -> Job:
    """Describe a copy.

    Args:
        spans: remote addresses are those of a mapping here, or the peer's; see ``method``.
            The job keeps the arrays alive.
        pid: the peer, for CopyMethod.CALL.
        method: how the peer's bytes are reached.
        write: whether the bytes go to the peer.
        deadline: of ``time.monotonic``.
    """
    job = Job(
        local=spans.local.ctypes.data,
        remote=spans.remote.ctypes.data,
        nbytes=spans.nbytes.ctypes.data,
        count=len(spans),
        deadline_ns=int(min(deadline, 2.0**33) * 1e9),
        pid=pid,
        method=method,
        write=write,
        streaming=(
            Streaming.STREAMED if spans.total_bytes >= STREAMING_BYTES else Streaming.CACHED
        ),
    )
    job.spans = spans
    job.mutex = threading.Lock()
    job.chunks = zip(  # equal lengths are cut alike
        vectors(spans.local, spans.nbytes, CHUNK_BYTES),
        vectors(spans.remote, spans.nbytes, CHUNK_BYTES),
        strict=True,
    )
    return job


class ShmCopier(Protocol):
    """Something that carries out jobs."""

    def run(self, job: Job) -> int:
        """Work on a job until nothing is left of it; returns a CopyOutcome or an errno."""
        ...

    def call_one(self, pid: int, write: int, local: int, remote: int, nbytes: int) -> int:
        """Move one piece with process_vm_readv or writev; returns 0 or an errno."""
        ...


class NativeCopier:
    """Drives copies by the compiled helper."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("copy.c").read_text()
        library = native.compile_c("shm_copy", source)
        self._run = library.mooncake_run
        self._run.argtypes = [ctypes.POINTER(Job)]
        self._call_one = library.mooncake_call_one
        wide = ctypes.c_uint64
        self._call_one.argtypes = [ctypes.c_int, ctypes.c_int, wide, wide, wide]

    def run(self, job: Job) -> int:
        return int(self._run(job))

    def call_one(self, pid: int, write: int, local: int, remote: int, nbytes: int) -> int:
        return int(self._call_one(pid, write, local, remote, nbytes))


class NumpyCopier:
    """Drives copies by ctypes over numpy's iovec arrays; copies mappings by calls on itself."""

    def run(self, job: Job) -> int:
        pid = job.pid if job.method == CopyMethod.CALL else os.getpid()
        while True:
            if job.stop:
                return CopyOutcome.STOPPED
            if time.monotonic_ns() > job.deadline_ns:
                return CopyOutcome.LATE
            with job.mutex:
                chunk = next(job.chunks, None)
            if chunk is None:
                return CopyOutcome.DONE
            if failed := call_vectors(pid, job.write, *chunk):
                return failed

    def call_one(self, pid: int, write: int, local: int, remote: int, nbytes: int) -> int:
        here = np.array([[local, nbytes]], np.uint64)
        there = np.array([[remote, nbytes]], np.uint64)
        return call_vectors(pid, write, here, there)


def best_copier() -> ShmCopier:
    """Return the compiled copier, or the numpy one, with a warning that says why."""
    try:
        return NativeCopier()
    except NativeUnavailable as exc:
        native.warn_fallback("shm_copy", "process_vm_readv through ctypes", exc.reason)
        return NumpyCopier()


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
    ended: Callable[[CopyTransfer], object]


class CopyTransfer(PendingTransfer):
    """A transfer that several threads carry out together; see ``Transfer``.

    Args:
        timeout: seconds for all of it, from now.
        local_keys: regions of this side that it touches.
        hooks: see there.
        copier: what they copy with.
        max_threads: how many take part at a time.
    """

    def __init__(
        self,
        timeout: float,
        local_keys: frozenset[int],
        hooks: CopyHooks,
        copier: ShmCopier,
        max_threads: int,
    ) -> None:
        super().__init__(deadline_after(timeout))
        self.local_keys = local_keys
        self.remote_keys: frozenset[int] = frozenset()
        self._hooks = hooks
        self._copier = copier
        self._max_threads = max_threads
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

    def wait(self, timeout: float | None = None) -> None:
        """The caller takes part, unless it can't wait for all of it: it has a core, where a thread
        that is woken up may be given one that is busy, and not run before the other has copied
        everything."""
        if timeout is None:
            self.run()
        super().wait(timeout)

    def run(self) -> None:
        """Take part in it for as long as there is something left to copy."""
        with self._lock:
            job = self._job
            if self._ended.is_set() or job is None or self._inside == self._max_threads:
                return
            self._inside += 1
        outcome = self._copier.run(job)
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
        if outcome == CopyOutcome.DONE:
            return self._hooks.verify()
        if outcome == CopyOutcome.STOPPED:
            return TransferCancelled("stopped by this side")
        return self.late() if outcome == CopyOutcome.LATE else self._hooks.explain(outcome)

    def _end(self) -> None:
        self._hooks.ended(self)
        self._ended.set()


class CopyThreads:
    """A few threads that carry out tasks in the order in which they were given.

    Args:
        count: how many.
        name: of the threads.
        copier: what they copy with.
    """

    def __init__(self, count: int, name: str, copier: ShmCopier) -> None:
        self.copier = copier
        self.count = count
        self.error: BaseException | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def share(self, copy: CopyTransfer) -> None:
        """Let every worker take part in a copy."""
        for _ in self._threads:
            self._tasks.put(copy.run)

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
