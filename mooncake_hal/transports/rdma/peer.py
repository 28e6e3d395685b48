"""A connection to one other RDMA endpoint: lanes, the transfers on them, and what fails."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import Protocol

from mooncake_hal.errors import (
    PeerLost,
    RegionRevoked,
    TransferCancelled,
    TransferError,
    TransportUnavailable,
)
from mooncake_hal.transport import Spans, Transfer
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.handshake import decode, encode
from mooncake_hal.transports.rdma.facts import (
    LanesOpened,
    RegionKeys,
    ReopenLane,
    decode_region_keys,
)
from mooncake_hal.transports.rdma.keys import KeyTables
from mooncake_hal.transports.rdma.lane import Fault, Lane, LaneState
from mooncake_hal.transports.rdma.progress import Progress
from mooncake_hal.transports.rdma.requests import RDMA_READ, RDMA_WRITE
from mooncake_hal.transports.rdma.striping import share_out
from mooncake_hal.transports.rdma.window import Run
from mooncake_hal.transports.rdma.work import Work
from mooncake_hal.transports.regions import check_spans
from mooncake_hal.transports.splitting import cut
from mooncake_hal.transports.transfers import (
    DONE,
    FinishedTransfer,
    RunningTransfer,
    deadline_after,
)

logger = logging.getLogger(__name__)

STUCK_SECONDS = 1.0
"""How long a stopped transfer's requests may linger before their queue pair is destroyed."""

REFRESH_SECONDS = 5.0
"""How long an unknown remote address may wait for the peer to say that it is not just new."""


class Neighbourhood(Protocol):
    """What a peer needs of its endpoint."""

    @property
    def progress(self) -> Progress:
        """Takes completions and keeps deadlines."""
        ...

    @property
    def local(self) -> AttachedRegions:
        """Our own regions."""
        ...

    @property
    def local_keys(self) -> KeyTables:
        """Our rails' keys of them."""
        ...


class RdmaPeer:
    """See ``Peer``.

    Args:
        endpoint: where it belongs.
        session: its control connection; closed with it.
        lanes: connected lanes and such as are down; at least one is ready.
        remote_rails: how many rails the other end has.
    """

    def __init__(
        self, endpoint: Neighbourhood, session: Session, lanes: list[Lane], remote_rails: int
    ) -> None:
        self._endpoint = endpoint
        self._session = session
        self._lanes = lanes
        self._piece_bytes = min(
            min(lane.rail.max_message, lane.rail.settings.piece_bytes) for lane in lanes
        )
        self._remote_rails = remote_rails
        self._remote_keys = KeyTables(remote_rails, self._look_up_remote_keys)
        self._turn = 0
        self._works: set[Work] = set()
        self._lock = threading.RLock()
        self._error: TransferError | None = None
        self.closed = False
        for lane in lanes:
            if lane.state is LaneState.READY:
                self._watch(lane)

    # -- the contract -----------------------------------------------------------------------------

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        """See ``Peer``."""
        return self._start(RDMA_READ, spans, timeout)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        """See ``Peer``."""
        return self._start(RDMA_WRITE, spans, timeout)

    def close(self) -> None:
        """See ``Peer``."""
        self.closed = True
        self.lost(PeerLost("the connection was closed on this side"))
        self._session.close()

    # -- called by the endpoint -------------------------------------------------------------------

    def lost(self, error: TransferError) -> None:
        """Fail and drain everything; nothing works any more. Idempotent."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            for lane in self._lanes:
                self._shut(lane)
                lane.rewind()
            for work in list(self._works):
                work.error = work.error or error
                work.unfinished = 0
                self._end(work)

    def withdraw(self, key: int) -> None:
        """End every transfer that touches our region ``key``; drained when this returns."""
        with self._lock:
            touched = [
                work for work in self._works if key in work.local_keys.touched(work.local_at)
            ]
        for work in touched:
            work.transfer.abort(RegionRevoked("its local region was revoked under the transfer"))

    def tick(self, now: float) -> float | None:
        """Stop what is late, break what does not drain; return when to be called next."""
        with self._lock:
            for work in list(self._works):
                if work.error is None and now >= work.transfer.deadline:
                    self._stop(work, work.transfer.late())
            self._break_stuck_lanes(now)
            for work in list(self._works):
                if work.awaits_verdict and now >= work.stopped_at + REFRESH_SECONDS:
                    self._verdict(work)
            moments = [
                work.transfer.deadline if work.error is None else now + STUCK_SECONDS
                for work in self._works
            ]
        return min(moments, default=None)

    # -- starting and ending ----------------------------------------------------------------------

    def _start(self, opcode: int, spans: Spans, timeout: float) -> Transfer:
        if self._error is not None:
            return FinishedTransfer(self._error)
        check_spans(spans)
        if not len(spans):
            return DONE
        deadline = deadline_after(timeout)
        local, local_at = self._endpoint.local.locate(spans.local, spans.nbytes)
        local_keys = self._endpoint.local_keys.of(local.keys)
        try:
            patience = min(deadline - time.monotonic(), REFRESH_SECONDS)
            remote, remote_at = self._session.locate(spans.remote, spans.nbytes, patience)
            remote_keys = self._remote_keys.of(remote.keys)
        except TransferError as exc:
            return FinishedTransfer(exc)
        pieces = cut(spans.local, spans.remote, spans.nbytes, self._piece_bytes)
        work = Work(
            opcode,
            spans,
            pieces,
            local_at[pieces.span],
            remote_at[pieces.span],
            local_keys,
            remote_keys,
        )
        work.transfer = RunningTransfer(1, deadline, lambda: self._cancel(work))
        return self._submit(work)

    def _submit(self, work: Work) -> Transfer:
        with self._lock:
            if self._error is not None:
                return FinishedTransfer(self._error)
            self._revive(time.monotonic())
            self._works.add(work)
            self._share(Run(work, 0, len(work)))
        self._endpoint.progress.wake_by(work.transfer.deadline)
        return work.transfer

    def _cancel(self, work: Work) -> None:
        with self._lock:
            self._stop(work, TransferCancelled("cancelled by this side"))

    def _stop(self, work: Work, error: TransferError) -> None:
        """Post no more of it; it ends when what is in flight is done."""
        if work.error is not None or work not in self._works:
            return
        work.error = error
        work.stopped_at = time.monotonic()
        for lane in self._lanes:
            work.unfinished -= lane.window.drop(work)
        self._end_if_done(work)
        self._endpoint.progress.wake_by(work.stopped_at + STUCK_SECONDS)

    def _end_if_done(self, work: Work) -> None:
        if work.unfinished == 0:
            self._end(work)

    def _end(self, work: Work) -> None:
        self._works.discard(work)
        work.transfer.part_ended(work.error)

    # -- lanes ------------------------------------------------------------------------------------

    def _share(self, run: Run[Work]) -> None:
        """Queue a run's pieces on the usable lanes and post what fits."""
        usable = [lane for lane in self._lanes if lane.state is LaneState.READY] or [
            lane for lane in self._lanes if lane.state is LaneState.REOPENING
        ]
        if not usable:
            self.lost(PeerLost("no lane to the peer works any more"))
            return
        parts = share_out(run.load.ends, run.start, run.stop, len(usable))
        self._turn += 1  # start elsewhere each time, so that small transfers use all lanes too
        for at, (start, stop) in enumerate(parts):
            usable[(self._turn + at) % len(usable)].window.add(Run(run.load, start, stop))
        for lane in usable:
            self._pump(lane)

    def _pump(self, lane: Lane) -> None:
        if lane.state is not LaneState.READY:
            return
        fault = lane.pump()
        if fault is not None:
            self._broken(lane, fault)

    def _advance(self, lane: Lane) -> None:
        """Take what completed on a lane; on the progress thread."""
        with self._lock:
            if lane.state is not LaneState.READY:
                return
            done, fault = lane.take()
            for work, count in done:
                work.unfinished -= count
                self._end_if_done(work)
            if fault is not None:
                self._broken(lane, fault)
            else:
                self._pump(lane)

    def _broken(self, lane: Lane, fault: Fault) -> None:
        """Destroy a broken lane's queue pair; blame the culprit, move the rest elsewhere."""
        self._shut(lane)
        left = lane.rewind()  # before anything can post to it again
        if fault.culprit is not None:
            self._reopen(lane)
            self._blame(fault.culprit, fault.reason)
        else:
            lane.go_down(time.monotonic())
            logger.warning("rdma lane %d on %s: %s", lane.number, lane.rail.name, fault.reason)
        self._resume(left)

    def _resume(self, runs: list[Run[Work]]) -> None:
        """Post again what a closed lane had not done."""
        for run in runs:
            if run.load.error is None:
                self._share(run)
            elif run.load in self._works:
                run.load.unfinished -= len(run)
                self._end_if_done(run.load)

    def _break_stuck_lanes(self, now: float) -> None:
        stuck = [w for w in self._works if w.error and now >= w.stopped_at + STUCK_SECONDS]
        for lane in self._lanes:
            if lane.state is LaneState.READY and any(lane.window.holds(work) for work in stuck):
                logger.warning("rdma lane %d does not drain; opening it anew", lane.number)
                self._shut(lane)
                left = lane.rewind()
                self._reopen(lane)
                self._resume(left)

    def _revive(self, now: float) -> None:
        """Try lanes again that have been down for long enough."""
        for lane in self._lanes:
            if lane.state is LaneState.DOWN and now >= lane.retry_at:
                self._reopen(lane)

    def _reopen(self, lane: Lane) -> None:
        """Ask the peer for a new queue pair to go with a new one of ours."""
        try:
            call = ReopenLane(lane.number, lane.open())
        except TransportUnavailable as exc:
            self._reopen_failed(lane, exc)
            return
        self._session.ask(encode(call)).add_done_callback(
            lambda answer: self._reopened(lane, answer)
        )

    def _reopened(self, lane: Lane, answer: Future[bytes]) -> None:
        """On the session's thread, or at once if the session is over."""
        with self._lock:
            if self._error is not None:
                self._shut(lane)
                return
            try:
                (remote,) = decode(answer.result(), LanesOpened).lanes
                lane.connect(remote)
            except (TransferError, ValueError) as exc:
                self._reopen_failed(lane, exc)
                return
            self._watch(lane)
            self._pump(lane)

    def _reopen_failed(self, lane: Lane, error: Exception) -> None:
        lane.go_down(time.monotonic())
        logger.warning("rdma lane %d does not open again: %s", lane.number, error)
        self._resume(lane.rewind())

    def _watch(self, lane: Lane) -> None:
        self._endpoint.progress.add(lane.fd, lambda: self._advance(lane))

    def _shut(self, lane: Lane) -> None:
        if lane.fd >= 0:
            self._endpoint.progress.remove(lane.fd)
        lane.close()

    # -- blame ------------------------------------------------------------------------------------

    def _blame(self, work: Work, reason: str) -> None:
        """End a transfer that the other side refused; why, is known once all news is in."""
        if work.error is not None:
            return
        work.unfinished += 1  # held open until the verdict
        work.awaits_verdict = True
        self._stop(work, TransferError(f"the peer's NIC refused the transfer: {reason}"))
        self._session.ping().add_done_callback(lambda _: self._verdict(work))

    def _verdict(self, work: Work) -> None:
        with self._lock:
            if not work.awaits_verdict or work not in self._works:
                return
            work.awaits_verdict = False
            work.error = self._what_was_wrong(work) or work.error
            work.unfinished -= 1
            self._end_if_done(work)

    def _what_was_wrong(self, work: Work) -> TransferError | None:
        """Look the transfer's remote spans up again, in what is registered now."""
        try:
            index, positions = self._session.regions.locate(work.spans.remote, work.spans.nbytes)
        except TransferError as exc:
            return exc
        if index.touched(positions) != work.remote_keys.touched(work.remote_at):
            return RegionRevoked("the region was revoked under the transfer, and another came")
        return None

    def _look_up_remote_keys(self, regions: list[int]) -> list[RegionKeys | None]:
        return [
            decode_region_keys(data, self._remote_rails) if data else None
            for data in self._session.regions.attachments(regions)
        ]
