"""One queue pair of a peer with its window: posts what is queued, takes what completes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple, Protocol

import numpy as np

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transports.rdma.compat import PostBatch
from mooncake_hal.transports.rdma.facts import LaneFacts
from mooncake_hal.transports.rdma.progress import is_readable
from mooncake_hal.transports.rdma.requests import RDMA_WRITE, Batch, RequestArray
from mooncake_hal.transports.rdma.settings import RdmaSettings
from mooncake_hal.transports.rdma.window import Run, Window
from mooncake_hal.transports.rdma.work import Work, batch_of

logger = logging.getLogger(__name__)

SIGNALS_PER_WINDOW = 4
POLL_BATCH = 32
COOLDOWN_SECONDS = 30.0
MAX_COOLDOWN_SECONDS = 300.0

WC_SUCCESS = 0
WC_FLUSHED = 5
ACCUSING_STATUSES = {4: "local protection", 9: "remote invalid request", 10: "remote access"}
"""Statuses that accuse a transfer rather than the path."""

STATUS_NAMES = {
    **ACCUSING_STATUSES,
    2: "the NIC could not send",  # soft-RoCE without a route, when its port has gone down
    WC_FLUSHED: "flushed",
    11: "remote operation",
    12: "no answer from the other side",
    13: "receiver not ready",
}


class LaneState(Enum):
    """What a lane is good for."""

    READY = auto()
    REOPENING = auto()
    DOWN = auto()


class Completion(Protocol):
    """A pyverbs work completion, as far as it is looked at."""

    @property
    def wr_id(self) -> int:
        """Number of the request that is done, and with it all before it."""
        ...

    @property
    def status(self) -> int:
        """WC_SUCCESS, or why it failed."""
        ...


class SendingPair(Protocol):
    """A queue pair to post to; see ``rail.QueuePair``."""

    @property
    def fd(self) -> int:
        """Descriptor that is readable when something completed."""
        ...

    @property
    def inline_bytes(self) -> int:
        """Longest write that can travel inside its request."""
        ...

    def facts(self) -> LaneFacts:
        """What the other end needs to connect to it."""
        ...

    def connect(self, remote: LaneFacts) -> None:
        """Make it ready to send to the other end; raises TransportUnavailable."""
        ...

    def poster(self) -> PostBatch:
        """Return the function that posts batches to it."""
        ...

    def completions(self, most: int) -> Sequence[Completion]:
        """Return up to ``most`` completions; never blocks."""
        ...

    def take_event(self) -> None:
        """Take the event that made ``fd`` readable, and ask for the next one."""
        ...

    def close(self) -> None:
        """Destroy it: no request of it touches memory here any more. Idempotent."""
        ...


class SendingRail(Protocol):
    """A port to send from; see ``rail.Rail``.

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

    def queue_pair(self) -> SendingPair:
        """Make a queue pair to post to; raises TransportUnavailable."""
        ...


class Fault(NamedTuple):
    """Why a lane broke.

    Args:
        status: the work completion's status; 0 if posting failed.
        culprit: the transfer that is to blame, if one is.
        reason: in words.
    """

    status: int
    culprit: Work | None
    reason: str


class Lane:
    """Not thread-safe: its peer holds a lock around every call.

    Args:
        number: its place among the peer's lanes.
        rail: our rail.
        remote_rail: number of the rail at the other end.
    """

    def __init__(self, number: int, rail: SendingRail, remote_rail: int) -> None:
        self.number = number
        self.rail = rail
        self.remote_rail = remote_rail
        self.state = LaneState.REOPENING
        self.retry_at = 0.0
        self._cooldown = COOLDOWN_SECONDS
        self.window: Window[Work] = Window(rail.window, rail.settings.window_bytes)
        signal_every = max(1, rail.window // SIGNALS_PER_WINDOW)
        self._least = signal_every
        self._requests = RequestArray(rail.window, signal_every)
        self._pair: SendingPair | None = None

    @property
    def fd(self) -> int:
        """Descriptor that is readable when something completed; -1 while closed."""
        return self._pair.fd if self._pair is not None else -1

    def open(self) -> LaneFacts:
        """Make a fresh queue pair; return what the other end needs to connect.

        Raises:
            TransportUnavailable: the NIC makes none.
        """
        self.state = LaneState.REOPENING
        self._pair = self.rail.queue_pair()
        self._post = self._pair.poster()
        return self._pair.facts()

    def connect(self, remote: LaneFacts) -> None:
        """Connect to the other end; ready afterwards. Raises TransportUnavailable."""
        self._require_pair().connect(remote)
        self.state = LaneState.READY

    def close(self) -> None:
        """Destroy the queue pair: nothing in flight touches memory here any more."""
        self.state = LaneState.DOWN
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def go_down(self, now: float) -> None:
        """Take it out of use for a while, longer each time in a row."""
        self.close()
        self.retry_at = now + self._cooldown
        self._cooldown = min(2 * self._cooldown, MAX_COOLDOWN_SECONDS)

    def pump(self) -> Fault | None:
        """Post what fits."""
        pair = self._require_pair()
        while True:
            run = self.window.post_next(self._least)
            if run is None:
                return None
            batch = batch_of(run, self.rail.number, self.remote_rail, pair.inline_bytes)
            try:
                self._post(self._requests, batch, run.first_id)
            except OSError as exc:
                return Fault(0, None, f"posting failed: {exc}")

    def take(self) -> tuple[list[tuple[Work, int]], Fault | None]:
        """Take an event and all completions; return pieces done per transfer, and what broke."""
        pair = self._require_pair()
        pair.take_event()
        done: list[tuple[Work, int]] = []
        while completions := pair.completions(POLL_BATCH):
            for completion in completions:
                if completion.status != WC_SUCCESS:
                    done += self.window.complete(completion.wr_id - 1)
                    return done, self._fault(completion)
                done += self.window.complete(completion.wr_id)
                self._cooldown = COOLDOWN_SECONDS
        return done, None

    def probe(self) -> None:
        """Post a write of nothing, which needs no memory at either end."""
        nothing = np.zeros(1, np.uint64)
        keys = np.zeros(1, np.uint32)
        self._post(self._requests, Batch(RDMA_WRITE, nothing, nothing, nothing, keys, keys), 0)

    def await_probe(self, deadline: float) -> str | None:
        """Wait until the probe has completed; return what is wrong, if something is."""
        pair = self._require_pair()
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

    def rewind(self) -> list[Run[Work]]:
        """Return all that is not done; only after ``close``."""
        return self.window.rewind()

    def _fault(self, completion: Completion) -> Fault:
        status, culprit = completion.status, None
        if status in ACCUSING_STATUSES:
            culprit = self.window.culprit(completion.wr_id)
        return Fault(status, culprit, _status_text(status))

    def _require_pair(self) -> SendingPair:
        if self._pair is None:
            raise TransportUnavailable("rdma", f"lane {self.number} has no queue pair")
        return self._pair


def _status_text(status: int) -> str:
    return f"work completion status {status} ({STATUS_NAMES.get(status, 'see ibv_wc_status')})"
