"""The client's side: transfers cut into parts, and the lanes that move them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import numpy as np

from mooncake_hal.errors import PeerLost, RegionRevoked, TransferError
from mooncake_hal.transport import Spans
from mooncake_hal.transports.regions import RegionTable, check_spans
from mooncake_hal.transports.splitting import limit_spans, split_spans
from mooncake_hal.transports.tcp.lanes import Lane, Part
from mooncake_hal.transports.tcp.streams import (
    INLINE_SECONDS,
    MAX_SPANS,
    Outcome,
    Status,
    failure,
    make_operation,
)
from mooncake_hal.transports.transfers import (
    DONE,
    FinishedTransfer,
    RunningTransfer,
    deadline_after,
    deadline_error,
)

INLINE_BYTES = 64 * 1024
"""Up to how much the caller's own thread moves, if a lane is idle."""

SPLIT_BYTES = 1024 * 1024
"""From how much on a transfer is cut among the lanes."""

_UINT64 = np.dtype(np.uint64)


class TcpPeer:
    """See ``mooncake_hal.transport.Peer``.

    Args:
        lanes: the connections; the first one is open.
        local: the regions of this side.
        on_close: called once, when it has been closed.
    """

    def __init__(
        self, lanes: list[Lane], local: RegionTable, on_close: Callable[[TcpPeer], object]
    ) -> None:
        self._lanes = lanes
        self._local = local
        self._on_close = on_close
        self._running: dict[RunningTransfer, frozenset[int]] = {}
        self._error: TransferError | None = None
        self._lock = threading.Lock()

    def read(self, spans: Spans, *, timeout: float) -> RunningTransfer | FinishedTransfer:
        """See ``Peer``."""
        return self._move(spans, timeout, write=False)

    def write(self, spans: Spans, *, timeout: float) -> RunningTransfer | FinishedTransfer:
        """See ``Peer``."""
        return self._move(spans, timeout, write=True)

    def close(self) -> None:
        """See ``Peer``."""
        with self._lock:
            if self._error is not None:
                return
            self._error = PeerLost("tcp: this side closed the connection")
            running = list(self._running)
        for transfer in running:
            transfer.abort(self._error)
        for lane in self._lanes:
            lane.close()
        self._on_close(self)

    def forget_local(self, key: int) -> None:
        """End the transfers that use a region which this side has just revoked."""
        with self._lock:
            using = [transfer for transfer, keys in self._running.items() if key in keys]
        for transfer in using:
            transfer.abort(RegionRevoked("this side revoked the local region"))
        while any(lane.claimed_key == key for lane in self._lanes):
            time.sleep(INLINE_SECONDS / 2)  # a caller's thread holds it for INLINE_SECONDS at most

    def _move(
        self, spans: Spans, timeout: float, *, write: bool
    ) -> RunningTransfer | FinishedTransfer:
        nbytes = spans.nbytes
        if (
            nbytes.size == spans.local.size == spans.remote.size == 1
            and nbytes.dtype is spans.local.dtype is spans.remote.dtype is _UINT64
            and 0 < (size := nbytes.item()) <= INLINE_BYTES
        ):
            lane = self._claim()
            if lane is not None:
                span = (spans.local.item(), spans.remote.item(), size)
                return self._move_one(lane, span, timeout, write=write)
        check_spans(spans)
        return self._move_many(spans, timeout, write=write) if len(spans) else DONE

    def _claim(self) -> Lane | None:
        for lane in self._lanes:
            if lane.claim():
                return lane
        return None

    def _move_one(
        self, lane: Lane, span: tuple[int, int, int], timeout: float, *, write: bool
    ) -> RunningTransfer | FinishedTransfer:
        """Move one small piece in the caller's thread, over a claimed lane."""
        local, remote, nbytes = span
        try:
            with self._lock:
                if self._error is not None:
                    raise self._error
                lane.claimed_key = key = self._local.find(local, nbytes)
        except TransferError:
            lane.unclaim()
            raise
        outcome = lane.move_one(write, local, remote, nbytes, timeout)
        operation = lane.operation
        if outcome == Outcome.DONE and operation.status == Status.OK:
            lane.unclaim()
            return DONE
        if outcome == Outcome.AGAIN:
            return self._leave(lane, key)
        error = deadline_error(timeout) if outcome == Outcome.LATE else failure(operation, outcome)
        lane.fail_claimed(outcome)
        return FinishedTransfer(error)

    def _leave(self, lane: Lane, key: int) -> RunningTransfer | FinishedTransfer:
        """Turn what a lane has begun in the caller's thread into a transfer that it finishes."""
        deadline = lane.operation.deadline_ns / 1e9
        transfer = RunningTransfer(1, deadline, lambda: part.stop(), self._forget)
        part = Part(transfer, lane.operation)
        with self._lock:
            error = self._error
            if error is None:
                self._running[transfer] = frozenset((key,))
        if error is not None:  # closed meanwhile: the lane's thread takes nothing on any more
            lane.fail_claimed(Outcome.STOPPED)
            return FinishedTransfer(error)
        lane.leave_unfinished(part)
        return transfer

    def _move_many(self, spans: Spans, timeout: float, *, write: bool) -> RunningTransfer:
        total = spans.total_bytes
        shares = [spans] if total < SPLIT_BYTES else split_spans(spans, len(self._lanes))
        shares = [piece for share in shares for piece in limit_spans(share, MAX_SPANS)]
        parts: list[Part] = []

        def stop() -> None:
            for part in parts:
                part.stop()

        transfer = RunningTransfer(len(shares), deadline_after(timeout), stop, self._forget)
        parts += [
            Part(transfer, make_operation(share, write=write, deadline=transfer.deadline))
            for share in shares
        ]
        self._admit(transfer, spans)
        self._start(parts, is_small=total <= INLINE_BYTES)
        return transfer

    def _admit(self, transfer: RunningTransfer, spans: Spans) -> None:
        """Check the local side, and let ``forget_local`` know of the transfer, in one step."""
        with self._lock:
            if self._error is not None:
                raise self._error
            for lane in self._lanes:
                if lane.error is not None:
                    raise TransferError("tcp: a connection's thread failed") from lane.error
            if len(spans) == 1:
                keys = frozenset((self._local.find(spans.local.item(), spans.nbytes.item()),))
            else:
                index, at = self._local.find_all(spans.local, spans.nbytes)
                keys = index.touched(at)
            self._running[transfer] = keys

    def _start(self, parts: list[Part], *, is_small: bool) -> None:
        if is_small and (lane := self._claim()) is not None:
            lane.move_claimed(parts[0])
            return
        lanes = sorted(self._lanes, key=lambda lane: lane.pending)
        for at, part in enumerate(parts):
            lanes[at % len(lanes)].submit(part)

    def _forget(self, transfer: RunningTransfer) -> None:
        with contextlib.suppress(KeyError):
            del self._running[transfer]
