"""One reliable connection of a peer: posts queued work requests and polls completions.

A connection outlives its queue pair: after an error it gets a new one and continues.
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
"""Statuses that are caused by the transfer itself, not by the path."""

STATUS_NAMES = {
    **ACCESS_ERRORS,
    2: "the NIC could not send",  # soft-RoCE without a route, when its port has gone down
    WC_FLUSHED: "flushed",
    11: "remote operation",
    12: "no response from the other side",
    13: "receiver not ready",
}


class ConnectionState(Enum):
    """The state of a connection."""

    READY = auto()
    REOPENING = auto()
    DOWN = auto()


class Completion(Protocol):
    """The fields of a work completion that are read."""

    @property
    def wr_id(self) -> int:
        """Number of the completed request; all earlier ones have completed, too."""
        ...

    @property
    def status(self) -> int:
        """WC_SUCCESS, or the reason of the failure."""
        ...


class SendingQueuePair(Protocol):
    """A queue pair to post to; see ``nic.QueuePair``."""

    @property
    def fd(self) -> int:
        """Descriptor that is readable if there is a completion event."""
        ...

    @property
    def inline_bytes(self) -> int:
        """Longest write that can be sent inline in its work request."""
        ...

    def info(self) -> QueuePairInfo:
        """The information that the other end needs to connect to it."""
        ...

    def connect(self, remote: QueuePairInfo) -> None:
        """Make it ready to send to the other end; raises TransportUnavailable."""
        ...

    def post(self, requests: WorkRequestArray, batch: SendBatch, first_id: int) -> None:
        """Post a batch, numbered from ``first_id``; raises OSError if not all of it is accepted."""
        ...

    def completions(self, max_count: int) -> Sequence[Completion]:
        """Return up to ``max_count`` completions, valid until the next call; never blocks."""
        ...

    def take_event(self) -> None:
        """Consume the event that made ``fd`` readable, and request the next one."""
        ...

    def close(self) -> None:
        """Destroy the queue pair: its requests access no local memory any more. Idempotent."""
        ...


class SendingNic(Protocol):
    """A port to send from; see ``Nic``.

    Args:
        number, name, settings: see ``Nic``.
        window: maximum number of requests in flight on one queue pair.
        max_message: maximum size of a request in bytes.
    """

    number: int
    name: str
    settings: RdmaSettings
    window: int
    max_message: int

    def queue_pair(self) -> SendingQueuePair:
        """Create a queue pair to post to; raises TransportUnavailable."""
        ...


class ConnectionFault(NamedTuple):
    """Why a connection broke.

    Args:
        status: the work completion's status; 0 if posting failed.
        refused: the transfer that caused the failure and must not be retried, or None.
        reason: description for messages.
    """

    status: int
    refused: RdmaTransfer | None
    reason: str


class RdmaConnection:
    """A reliable connection between two NICs, with its send window.

    Not thread-safe: its peer holds a lock during every call.

    Args:
        number: index among the peer's connections.
        nic: the local NIC.
        remote_nic: index of the NIC at the other end.
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
        """Descriptor that is readable if there is a completion event; -1 while closed."""
        return self._pair.fd if self._pair is not None else -1

    def open(self) -> QueuePairInfo:
        """Create a new queue pair; returns the information that the other end needs to connect.

        Raises:
            TransportUnavailable: the NIC can't create one.
        """
        self.state = ConnectionState.REOPENING
        self._pair = self.nic.queue_pair()
        return self._pair.info()

    def connect(self, remote: QueuePairInfo) -> None:
        """Connect the queue pair to the other end; the connection is ready afterwards. Raises
        TransportUnavailable."""
        self._require_queue_pair().connect(remote)
        self.state = ConnectionState.READY

    def close(self) -> None:
        """Destroy the queue pair: requests in flight access no local memory any more."""
        self.state = ConnectionState.DOWN
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def mark_down(self, now: float) -> None:
        """Take the connection out of use; the time until it is retried doubles with each
        consecutive failure."""
        self.close()
        self.retry_at = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, MAX_COOLDOWN_SECONDS)

    def post_queued(self) -> ConnectionFault | None:
        """Post as many queued pieces as the window permits."""
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
        """Consume an event and poll all completions; returns the completed pieces per transfer, and
        the fault if one failed."""
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
        """Post an empty write, which needs no memory at either end."""
        nothing = np.zeros(1, np.uint64)
        keys = np.zeros(1, np.uint32)
        empty = SendBatch(RDMA_WRITE, nothing, nothing, nothing, keys, keys)
        self._require_queue_pair().post(self._requests, empty, 0)

    def wait_for_probe(self, deadline: float) -> str | None:
        """Wait until the probe completes; returns what went wrong, or None."""
        pair = self._require_queue_pair()
        while True:
            for completion in pair.completions(1):
                if completion.status == WC_SUCCESS:
                    return None
                return _status_text(completion.status)
            left = deadline - time.monotonic()
            if left <= 0:
                return "no response in time"
            if is_readable(pair.fd, left):
                pair.take_event()

    def take_unfinished(self) -> list[PieceRun[RdmaTransfer]]:
        """Empty the window; returns everything that has not completed. Call it only after
        ``close``."""
        return self.window.take_unfinished()

    def _require_queue_pair(self) -> SendingQueuePair:
        if self._pair is None:
            raise TransportUnavailable("rdma", f"connection {self.number} has no queue pair")
        return self._pair


def _status_text(status: int) -> str:
    return f"work completion status {status} ({STATUS_NAMES.get(status, 'see ibv_wc_status')})"
