"""Copies between two processes' memory, by system call or through a mapping, and the threads that
run them."""

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
"""Copies of at least this many bytes bypass the caches. To memory that is not cached, that is 1.5
times as fast as memcpy, and still faster if all of the data is read right afterwards. From this
size on, it is also no slower to memory that is cached, as in a benchmark that repeats itself."""


class CopyMethod(IntEnum):
    """How a copy accesses the peer's memory: through a mapping, or with a system call."""

    MAPPING = 0
    CALL = 1


class Streaming(IntEnum):
    """Whether a copy bypasses the caches, and how."""

    CACHED = 0
    STREAMED = 1
    """In the way that is fastest on this CPU."""
    STREAMED_BY_PAGES = 2
    """Several pages at a time, on any CPU."""


class CopyOutcome(IntEnum):
    """How one thread's run over a job ended; positive values are errno numbers."""

    DONE = 0
    STOPPED = -1
    LATE = -2


class Job(ctypes.Structure):
    """One copy, which several threads may run together. The layout is that of ``struct job`` in
    copy.c."""

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
    """Create a job, which keeps the spans' arrays alive.

    Args:
        spans: the spans to copy. With CopyMethod.MAPPING, remote addresses are those of the mapping
            in this process; otherwise they are the peer's.
        pid: the peer's pid, for CopyMethod.CALL.
        method: how to access the peer's memory.
        write: whether the bytes are written to the peer; otherwise they are read.
        deadline: ``time.monotonic`` value by which it must be done.
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
    job.chunks = zip(  # both sides have the same lengths, so they are cut at the same positions
        vectors(spans.local, spans.nbytes, CHUNK_BYTES),
        vectors(spans.remote, spans.nbytes, CHUNK_BYTES),
        strict=True,
    )
    return job


class ShmCopier(Protocol):
    """An implementation of copies."""

    def run(self, job: Job) -> int:
        """Copy chunks of a job until none is left; returns a CopyOutcome or an errno."""
        ...

    def call_one(self, pid: int, write: int, local: int, remote: int, nbytes: int) -> int:
        """Copy one piece with process_vm_readv or process_vm_writev; returns 0 or an errno."""
        ...


class NativeCopier:
    """``ShmCopier`` implemented by copy.c."""

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
    """``ShmCopier`` that calls process_vm_readv and process_vm_writev through ctypes; copies mapped
    memory with calls on its own process."""

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
    """Return the compiled copier; if it is unavailable, log why and return the numpy one."""
    try:
        return NativeCopier()
    except NativeUnavailable as exc:
        native.warn_fallback("shm_copy", "process_vm_readv through ctypes", exc.reason)
        return NumpyCopier()


@dataclass(frozen=True, slots=True)
class CopyHooks:
    """Callbacks of a copy into the peer that it belongs to.

    Args:
        explain: converts the errno of a failed copy to an error.
        verify: called when all bytes have been copied; returns an error if the peer was lost by
            then.
        ended: called once, when the copy has ended.
    """

    explain: Callable[[int], TransferError]
    verify: Callable[[], TransferError | None]
    ended: Callable[[CopyTransfer], object]


class CopyTransfer(PendingTransfer):
    """A transfer that several threads run together; see ``Transfer``.

    Args:
        timeout: timeout of the whole transfer, in seconds from now.
        local_keys: keys of this side's regions that it touches.
        hooks: callbacks into the peer.
        copier: copies the bytes.
        max_threads: maximum number of threads that run it at a time.
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
        self._num_running = 0

    def begin(self, job: Job, remote_keys: frozenset[int]) -> None:
        """Set the job; nothing is copied if the transfer was aborted before."""
        with self._lock:
            self.remote_keys = remote_keys
            self._job = job
            if self._error is not None:
                job.stop = 1

    def fail(self, error: TransferError) -> None:
        """Fail the transfer before anything was copied."""
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
            idle = self._num_running == 0
        if idle:
            self._end()
        self._ended.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Without a timeout, the calling thread copies, too: it already has a core, whereas a
        thread that is woken up may be scheduled on a busy one and not run before the copy is
        done."""
        if timeout is None:
            self.run()
        super().wait(timeout)

    def run(self) -> None:
        """Copy chunks in the calling thread until none is left, unless enough threads do so
        already."""
        with self._lock:
            job = self._job
            if self._ended.is_set() or job is None or self._num_running == self._max_threads:
                return
            self._num_running += 1
        outcome = self._copier.run(job)
        error = self._error_of(outcome)
        with self._lock:
            self._num_running -= 1
            self._error = self._error or error
            if self._error is not None:
                job.stop = 1
            last = self._num_running == 0
        if last:
            self._end()

    def _error_of(self, outcome: int) -> TransferError | None:
        if outcome == CopyOutcome.DONE:
            return self._hooks.verify()
        if outcome == CopyOutcome.STOPPED:
            return TransferCancelled("stopped by this side")
        return self.late() if outcome == CopyOutcome.LATE else self._hooks.explain(outcome)

    def _end(self) -> None:
        self._hooks.ended(self)
        self._ended.set()


class CopyThreads:
    """A pool of threads that run copies and other tasks in the order of their submission.

    Args:
        count: number of threads.
        name: prefix of the threads' names.
        copier: copies the bytes.

    Raises:
        TransferError: a thread can't be started.
    """

    def __init__(self, count: int, name: str, copier: ShmCopier) -> None:
        self.copier = copier
        self.count = count
        self.error: BaseException | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for index in range(count):
            thread = threading.Thread(target=self._loop, name=f"{name}-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                self.close()
                raise TransferError(f"shm: a copying thread can't be started: {exc}") from exc
            self._threads.append(thread)

    def share(self, copy: CopyTransfer) -> None:
        """Let all threads run a copy together."""
        for _ in self._threads:
            self._tasks.put(copy.run)

    def call(self, task: Callable[[], None]) -> None:
        """Call ``task`` on one of the threads."""
        self._tasks.put(task)

    def close(self) -> None:
        """Finish all submitted tasks and join the threads. Idempotent."""
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
