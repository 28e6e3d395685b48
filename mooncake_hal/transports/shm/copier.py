"""Copying spans between this process and another of the same host.

Two ways for the bytes (a mapping of the peer's memory, or process_vm_readv and writev) times two
ways to drive them (the compiled helper, or ctypes over iovec arrays that numpy builds). None of
them runs Python per piece.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mooncake_hal import native
from mooncake_hal.errors import NativeUnavailable
from mooncake_hal.transport import Spans
from mooncake_hal.transports.scatter import call_vectors, vectors

CHUNK_BYTES = 4 << 20
STREAMING_BYTES = 32 << 20
"""From how many bytes on a copy bypasses the caches: it would only flush them."""


class Method(IntEnum):
    """How the peer's bytes are reached."""

    MAPPING = 0
    CALL = 1


class Outcome(IntEnum):
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


def make_job(spans: Spans, *, pid: int, method: Method, write: bool, deadline: float) -> Job:
    """Describe a copy.

    Args:
        spans: remote addresses are those of a mapping here, or the peer's; see ``method``.
            The job keeps the arrays alive.
        pid: the peer, for Method.CALL.
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
        streaming=spans.total_bytes >= STREAMING_BYTES,
    )
    job.spans = spans
    job.mutex = threading.Lock()
    job.chunks = zip(  # equal lengths are cut alike
        vectors(spans.local, spans.nbytes, CHUNK_BYTES),
        vectors(spans.remote, spans.nbytes, CHUNK_BYTES),
        strict=True,
    )
    return job


class Copier(Protocol):
    """Something that carries out jobs."""

    def run(self, job: Job) -> int:
        """Work on a job until nothing is left of it; returns an Outcome or an errno."""
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
        """See ``Copier``."""
        return int(self._run(job))

    def call_one(self, pid: int, write: int, local: int, remote: int, nbytes: int) -> int:
        """See ``Copier``."""
        return int(self._call_one(pid, write, local, remote, nbytes))


class NumpyCopier:
    """Drives copies by ctypes over numpy's iovec arrays; copies mappings by calls on itself."""

    def run(self, job: Job) -> int:
        """See ``Copier``."""
        pid = job.pid if job.method == Method.CALL else os.getpid()
        while True:
            if job.stop:
                return Outcome.STOPPED
            if time.monotonic_ns() > job.deadline_ns:
                return Outcome.LATE
            with job.mutex:
                chunk = next(job.chunks, None)
            if chunk is None:
                return Outcome.DONE
            if failed := call_vectors(pid, job.write, *chunk):
                return failed

    def call_one(self, pid: int, write: int, local: int, remote: int, nbytes: int) -> int:
        """See ``Copier``."""
        here = np.array([[local, nbytes]], np.uint64)
        there = np.array([[remote, nbytes]], np.uint64)
        return call_vectors(pid, write, here, there)


def best_copier() -> Copier:
    """Return the compiled copier, or the numpy one, with a warning that says why."""
    try:
        return NativeCopier()
    except NativeUnavailable as exc:
        native.warn_fallback("shm_copy", "process_vm_readv through ctypes", exc.reason)
        return NumpyCopier()
