"""One reliable connection of a peer: posts what is queued, takes what has completed.

A connection outlives its queue pair: after an error it gets a new one, and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transports.rdma.progress_thread import is_readable
from mooncake_hal.transports.rdma.rdma_messages import QueuePairInfo
from mooncake_hal.transports.rdma.rdma_settings import RdmaSettings
from mooncake_hal.transports.rdma.send_window import PieceRun, SendWindow
from mooncake_hal.transports.rdma.work_requests import (
    RDMA_WRITE,
    RdmaTransfer,
    SendBatch,
    WorkRequestArray,
    batch_of,
)

logger = logging.getLogger(__name__)

SIGNALS_PER_WINDOW = 4
POLL_BATCH = 32
COOLDOWN_SECONDS = 30.0
MAX_COOLDOWN_SECONDS = 300.0

WC_SUCCESS = 0
WC_FLUSHED = 5
ACCESS_ERRORS = {4: "local protection", 9: "remote invalid request", 10: "remote access"}
"""Statuses that are a transfer's fault, not the path's."""

STATUS_NAMES = {
    **ACCESS_ERRORS,
    2: "the NIC could not send",  # soft-RoCE without a route, when its port has gone down
    WC_FLUSHED: "flushed",
    11: "remote operation",
    12: "no answer from the other side",
    13: "receiver not ready",
}


class ConnectionState(Enum):
    """What a connection is good for."""

    READY = auto()
    REOPENING = auto()
    DOWN = auto()


class Completion(Protocol):
    """A work completion, as far as it is looked at."""

    @property
    def wr_id(self) -> int:
        """Number of the request that is done, and with it all before it."""
        ...

    @property
    def status(self) -> int:
        """WC_SUCCESS, or why it failed."""
        ...


class SendingQueuePair(Protocol):
    """A queue pair to post to; see ``nic.QueuePair``."""

    @property
    def fd(self) -> int:
        """Descriptor that is readable when something completed."""
        ...

    @property
    def inline_bytes(self) -> int:
        """Longest write that can travel inside its request."""
        ...

    def info(self) -> QueuePairInfo:
        """What the other end needs to connect to it."""
        ...

    def connect(self, remote: QueuePairInfo) -> None:
        """Make it ready to send to the other end; raises TransportUnavailable."""
        ...

    def post(self, requests: WorkRequestArray, batch: SendBatch, first_id: int) -> None:
        """Post a batch, numbered from ``first_id``; OSError if it is not taken whole."""
        ...

    def completions(self, most: int) -> Sequence[Completion]:
        """Return up to ``most`` completions, good until the next call; never blocks."""
        ...

    def take_event(self) -> None:
        """Take the event that made ``fd`` readable, and ask for the next one."""
        ...

    def close(self) -> None:
        """Destroy it: no request of it touches memory here any more. Idempotent."""
        ...


class SendingNic(Protocol):
    """A port to send from; see ``Nic``.

    Args:
        number, name, settings: as there.
        window: most requests in flight on one queue pair.
        max_message: longest request, in bytes.
    """

    number: int
    name: str
    settings: RdmaSettings
    window: int
    max_message: int

    def queue_pair(self) -> SendingQueuePair:
        """Make a queue pair to post to; raises TransportUnavailable."""
        ...


class ConnectionFault(NamedTuple):
    """Why a connection broke.

    Args:
        status: the work completion's status; 0 if posting failed.
        refused: the transfer that is refused, if one is.
        reason: in words.
    """

    status: int
    refused: RdmaTransfer | None
    reason: str


class RdmaConnection:
    """Not thread-safe: its peer holds a lock around every call.

    Args:
        number: its index among the peer's connections.
        nic: our NIC.
        remote_nic: number of the NIC at the other end.
    """

    def __init__(self, number: int, nic: SendingNic, remote_nic: int) -> None:
        self.number = number
        self.nic = nic
        self.remote_nic = remote_nic
        self.state = ConnectionState.REOPENING
        self.retry_at = 0.0
        self._cooldown = COOLDOWN_SECONDS
        self.window: SendWindow[RdmaTransfer] = SendWindow(nic.window, nic.settings.window_bytes)
        signal_every = max(1, nic.window // SIGNALS_PER_WINDOW)
        self._least = signal_every
        self._requests = WorkRequestArray(nic.window, signal_every)
        self._pair: SendingQueuePair | None = None

    @property
    def fd(self) -> int:
        """Descriptor that is readable when something completed; -1 while closed."""
        return self._pair.fd if self._pair is not None else -1

    def open(self) -> QueuePairInfo:
        """Make a fresh queue pair; return what the other end needs to connect.

        Raises:
            TransportUnavailable: the NIC makes none.
        """
        self.state = ConnectionState.REOPENING
        self._pair = self.nic.queue_pair()
        return self._pair.info()

    def connect(self, remote: QueuePairInfo) -> None:
        """Connect to the other end; ready afterwards. Raises TransportUnavailable."""
        self._require_queue_pair().connect(remote)
        self.state = ConnectionState.READY

    def close(self) -> None:
        """Destroy the queue pair: nothing in flight touches memory here any more."""
        self.state = ConnectionState.DOWN
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def mark_down(self, now: float) -> None:
        """Take it out of use for a while, longer each time in a row."""
        self.close()
        self.retry_at = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, MAX_COOLDOWN_SECONDS)

    def post_queued(self) -> ConnectionFault | None:
        """Post what fits."""
        pair = self._require_queue_pair()
        while True:
            run = self.window.post_next(self._least)
            if run is None:
                return None
            batch = batch_of(run, self.nic.number, self.remote_nic, pair.inline_bytes)
            try:
                pair.post(self._requests, batch, run.first_id)
            except OSError as exc:
                return ConnectionFault(0, None, f"posting failed: {exc}")

    def take_completions(self) -> tuple[list[tuple[RdmaTransfer, int]], ConnectionFault | None]:
        """Take an event and all completions; return pieces done per transfer, and what broke."""
        pair = self._require_queue_pair()
        pair.take_event()
        done: list[tuple[RdmaTransfer, int]] = []
        while completions := pair.completions(POLL_BATCH):
            for completion in completions:
                status = completion.status
                if status != WC_SUCCESS:
                    done += self.window.complete(completion.wr_id - 1)
                    owner = self.window.owner_of(completion.wr_id)
                    refused = owner if status in ACCESS_ERRORS else None
                    return done, ConnectionFault(status, refused, _status_text(status))
                done += self.window.complete(completion.wr_id)
                self._cooldown = COOLDOWN_SECONDS
        return done, None

    def probe(self) -> None:
        """Post a write of nothing, which needs no memory at either end."""
        nothing = np.zeros(1, np.uint64)
        keys = np.zeros(1, np.uint32)
        empty = SendBatch(RDMA_WRITE, nothing, nothing, nothing, keys, keys)
        self._require_queue_pair().post(self._requests, empty, 0)

    def wait_for_probe(self, deadline: float) -> str | None:
        """Wait until the probe has completed; return what is wrong, if something is."""
        pair = self._require_queue_pair()
        while True:
            for completion in pair.completions(1):
                if completion.status == WC_SUCCESS:
                    return None
                return _status_text(completion.status)
            left = deadline - time.monotonic()
            if left <= 0:
                return "no answer in time"
            if is_readable(pair.fd, left):
                pair.take_event()

    def take_unfinished(self) -> list[PieceRun[RdmaTransfer]]:
        """Return all that is not done; only after ``close``."""
        return self.window.take_unfinished()

    def _require_queue_pair(self) -> SendingQueuePair:
        if self._pair is None:
            raise TransportUnavailable("rdma", f"connection {self.number} has no queue pair")
        return self._pair


def _status_text(status: int) -> str:
    return f"work completion status {status} ({STATUS_NAMES.get(status, 'see ibv_wc_status')})"
