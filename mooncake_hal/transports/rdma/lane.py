"""One queue pair of a peer with its window: posts what is queued, takes what completes."""

from __future__ import annotations

import logging
import select
import time
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.transports.rdma.facts import LaneFacts
from mooncake_hal.transports.rdma.rail import QueuePair, Rail
from mooncake_hal.transports.rdma.requests import RDMA_WRITE, Batch, RequestArray
from mooncake_hal.transports.rdma.window import Run, Window
from mooncake_hal.transports.rdma.work import Work, batch_of

logger = logging.getLogger(__name__)

SIGNALS_PER_WINDOW = 4
POLL_BATCH = 32
COOLDOWN_SECONDS = 30.0
MAX_COOLDOWN_SECONDS = 300.0

WC_SUCCESS = 0
WC_FLUSHED = 5
ACCESS_STATUSES = {4: "local protection", 9: "remote invalid request", 10: "remote access"}
"""Statuses that accuse a transfer rather than the path."""

STATUS_NAMES = {
    **ACCESS_STATUSES,
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

    def __init__(self, number: int, rail: Rail, remote_rail: int) -> None:
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
        self._pair: QueuePair | None = None

    @property
    def fd(self) -> int:
        """Descriptor that is readable when something completed; -1 while closed."""
        return self._pair.fd if self._pair is not None else -1

    def open(self) -> LaneFacts:
        """Make a fresh queue pair; return what the other end needs to connect."""
        self.state = LaneState.REOPENING
        self._pair = QueuePair(self.rail, sends=True)
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
            if select.select([pair.fd], [], [], left)[0]:
                pair.take_event()

    def rewind(self) -> list[Run[Work]]:
        """Return all that is not done; only after ``close``."""
        return self.window.rewind()

    def _fault(self, completion: object) -> Fault:
        status, request_id = int(completion.status), int(completion.wr_id)  # type: ignore[attr-defined]  # a pyverbs WC
        culprit = self.window.culprit(request_id) if status in ACCESS_STATUSES else None
        return Fault(status, culprit, _status_text(status))

    def _require_pair(self) -> QueuePair:
        if self._pair is None:
            raise TransportUnavailable("rdma", f"lane {self.number} has no queue pair")
        return self._pair


def _status_text(status: int) -> str:
    return f"work completion status {status} ({STATUS_NAMES.get(status, 'see ibv_wc_status')})"
