"""The thread that copies for one endpoint, piece by piece, so that a transfer can be stopped."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mooncake_hal.errors import HalError, TransferCancelled, TransferError
from mooncake_hal.transport import Spans, TransferState
from mooncake_hal.transports.transfers import RunningTransfer, deadline_after
from mooncake_hal_cuda.ipc.copier import Addresses, Copier

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""Copied between two looks at the deadline: about a millisecond on NVLink, ten on PCIe."""

PIECE_SPANS = 1 << 16


class Locate(Protocol):
    """Turns a transfer's spans into addresses that this process can use, or refuses."""

    def __call__(self, spans: Spans, deadline: float) -> Addresses:
        """Return where the remote pieces are mapped: [n]; raises TransferError."""
        ...


class Job:
    """A transfer and what it takes to make it.

    Args:
        spans: what moves.
        is_write: to the peer, not from it.
        timeout: seconds for all of it.
        locate: says where the remote pieces are; asked before every piece of work.
        local_keys: our regions that it touches.
    """

    def __init__(
        self,
        spans: Spans,
        is_write: bool,
        timeout: float,
        locate: Locate,
        local_keys: frozenset[int],
    ) -> None:
        self.spans = spans
        self.is_write = is_write
        self.locate = locate
        self.local_keys = local_keys
        self.is_stopped = threading.Event()
        self.transfer = RunningTransfer(1, deadline_after(timeout), self.is_stopped.set)

    @property
    def is_over(self) -> bool:
        """Whether its transfer has ended."""
        return self.transfer.poll() is not TransferState.PENDING

    def run(self, copier: Copier) -> None:
        """Copy all of it.

        Raises:
            TransferError: it was stopped, is late, or the peer's memory is gone.
        """
        for begin, end in cut(self.spans.nbytes):
            if self.is_stopped.is_set():
                raise TransferCancelled("stopped before it was done")
            if time.monotonic() > self.transfer.deadline:
                raise self.transfer.late()
            spans = self.spans
            part = Spans(spans.local[begin:end], spans.remote[begin:end], spans.nbytes[begin:end])
            mapped = self.locate(part, self.transfer.deadline)
            ends = (mapped, part.local) if self.is_write else (part.local, mapped)
            copier.copy(*ends, part.nbytes)
            copier.drain()


class Worker:
    """Owns a copier; jobs are done in the order they came.

    Args:
        make_copier: called on the thread, which it binds to the device.
    """

    def __init__(self, make_copier: Callable[[], Copier]) -> None:
        self._make_copier = make_copier
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="cuda-ipc-copy", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Take a job; raises TransferError if the thread has failed."""
        if self._error is not None:
            raise TransferError("cuda_ipc: the copying thread failed") from self._error
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread once its jobs are done."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        try:
            copier = self._make_copier()
            while (job := self._jobs.get()) is not None:
                self._end(job, copier)
            copier.close()
        except Exception as exc:  # thread top: whoever waits must hear of it
            logger.exception("cuda_ipc: the copying thread failed")
            self._error = exc
            self._refuse_all(exc)

    def _end(self, job: Job, copier: Copier) -> None:
        error: TransferError | None = None
        try:
            job.run(copier)
        except TransferError as exc:
            error = exc
        except HalError as exc:
            error = TransferError(f"cuda_ipc: {exc}")
        except BaseException as exc:
            job.transfer.part_ended(TransferError(f"cuda_ipc: the copying thread failed: {exc!r}"))
            raise
        job.transfer.part_ended(error)

    def _refuse_all(self, exc: Exception) -> None:
        while (job := self._jobs.get()) is not None:
            job.transfer.part_ended(TransferError(f"cuda_ipc: the copying thread failed: {exc!r}"))


def cut(nbytes: Addresses) -> list[tuple[int, int]]:
    """Cut spans into ranges of at most PIECE_SPANS and, where a span does not exceed it alone,
    PIECE_BYTES: [(begin, end), ...].
    """
    before = np.cumsum(nbytes, dtype=np.uint64) - nbytes
    ranges, begin = [], 0
    while begin < len(nbytes):
        limit = before[begin] + np.uint64(PIECE_BYTES)
        end = int(np.searchsorted(before, limit, side="left"))
        end = min(max(end, begin + 1), begin + PIECE_SPANS, len(nbytes))
        ranges.append((begin, end))
        begin = end
    return ranges
