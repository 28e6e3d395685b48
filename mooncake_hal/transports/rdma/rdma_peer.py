"""The client's side of the rdma transport: a peer's reliable connections, its transfers, and
recovery from failures."""

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
from mooncake_hal.session.authentication import decode, encode
from mooncake_hal.session.regions import AttachedRegions, check_spans
from mooncake_hal.session.session import Session
from mooncake_hal.transport import Spans, Transfer
from mooncake_hal.transports.rdma.progress_thread import ProgressThread
from mooncake_hal.transports.rdma.rdma_connection import (
    ConnectionFault,
    ConnectionState,
    RdmaConnection,
)
from mooncake_hal.transports.rdma.rdma_messages import (
    QueuePairsOpened,
    RegionKeys,
    ReopenQueuePair,
    decode_region_keys,
)
from mooncake_hal.transports.rdma.send_window import PieceRun, stripe
from mooncake_hal.transports.rdma.work_requests import (
    RDMA_READ,
    RDMA_WRITE,
    RdmaTransfer,
    RegionKeyTables,
)
from mooncake_hal.transports.spans import cut
from mooncake_hal.transports.transfers import (
    DONE,
    FinishedTransfer,
    RunningTransfer,
    deadline_after,
)

logger = logging.getLogger(__name__)

STUCK_SECONDS = 1.0
"""If a stopped transfer's requests are still in flight after this time, their queue pair is
destroyed."""

REFRESH_SECONDS = 5.0
"""Timeout for the peer to confirm its registrations, if a remote address is unknown or was
rejected."""


class RdmaPeerContext(Protocol):
    """The parts of an endpoint that its peers use."""

    @property
    def progress(self) -> ProgressThread:
        """The endpoint's progress thread."""
        ...

    @property
    def local(self) -> AttachedRegions:
        """The endpoint's own regions."""
        ...

    @property
    def local_keys(self) -> RegionKeyTables:
        """The NICs' keys of these regions."""
        ...


class RdmaPeer:
    """Moves transfers over reliable connections to one endpoint.

    Args:
        endpoint: the local endpoint.
        session: session to the other end; closed with the peer.
        connections: the connections, each ready or down; at least one is ready.
        remote_nics: number of NICs of the other end.
    """

    def __init__(
        self,
        endpoint: RdmaPeerContext,
        session: Session,
        connections: list[RdmaConnection],
        remote_nics: int,
    ) -> None:
        self._endpoint = endpoint
        self._session = session
        self._connections = connections
        self._piece_bytes = min(
            min(connection.nic.max_message, connection.nic.settings.piece_bytes)
            for connection in connections
        )
        self._remote_nics = remote_nics
        self._remote_keys = RegionKeyTables(remote_nics, self._look_up_remote_keys)
        self._turn = 0
        self._transfers: set[RdmaTransfer] = set()
        self._lock = threading.RLock()
        self._error: TransferError | None = None
        self.closed = False
        for connection in connections:
            if connection.state is ConnectionState.READY:
                self._watch(connection)

    def read(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._start(RDMA_READ, spans, timeout)

    def write(self, spans: Spans, *, timeout: float) -> Transfer:
        return self._start(RDMA_WRITE, spans, timeout)

    def close(self) -> None:
        self.closed = True
        self.lost(PeerLost("the connection was closed on this side"))
        self._session.close()

    def lost(self, error: TransferError) -> None:
        """Fail and drain all transfers; the peer can't be used afterwards. Idempotent."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            for connection in self._connections:
                self._close_connection(connection)
                connection.take_unfinished()
            for transfer in list(self._transfers):
                transfer.error = transfer.error or error
                transfer.unfinished = 0
                self._end(transfer)

    def abort_in_region(self, key: int) -> None:
        """Fail every transfer that touches our region ``key``; they are drained when this
        returns."""
        with self._lock:
            touched = [
                transfer
                for transfer in self._transfers
                if key in transfer.local_keys.touched(transfer.local_at)
            ]
        for transfer in touched:
            transfer.handle.abort(RegionRevoked("the local region was revoked in mid-transfer"))

    def tick(self, now: float) -> float | None:
        """Stop transfers whose deadline has passed, and break connections that do not drain;
        returns when to be called next."""
        with self._lock:
            for transfer in list(self._transfers):
                if transfer.error is None and now >= transfer.handle.deadline:
                    self._stop(transfer, transfer.handle.late())
            self._break_stuck(now)
            for transfer in list(self._transfers):
                if transfer.awaits_reason and now >= transfer.stopped_at + REFRESH_SECONDS:
                    self._end_refused(transfer)
            moments = [
                transfer.handle.deadline if transfer.error is None else now + STUCK_SECONDS
                for transfer in self._transfers
            ]
        return min(moments, default=None)

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
            locate_timeout = min(deadline - time.monotonic(), REFRESH_SECONDS)
            remote, remote_at = self._session.locate(spans.remote, spans.nbytes, locate_timeout)
            remote_keys = self._remote_keys.of(remote.keys)
        except TransferError as exc:
            return FinishedTransfer(exc)
        pieces = cut(spans.local, spans.remote, spans.nbytes, self._piece_bytes)
        transfer = RdmaTransfer(
            opcode,
            spans,
            pieces,
            local_at[pieces.span],
            remote_at[pieces.span],
            local_keys,
            remote_keys,
        )
        transfer.handle = RunningTransfer(1, deadline, lambda: self._cancel(transfer))
        return self._submit(transfer)

    def _submit(self, transfer: RdmaTransfer) -> Transfer:
        with self._lock:
            if self._error is not None:
                return FinishedTransfer(self._error)
            self._retry_down(time.monotonic())
            self._transfers.add(transfer)
            self._stripe(PieceRun(transfer, 0, len(transfer)))
        self._endpoint.progress.wake_by(transfer.handle.deadline)
        return transfer.handle

    def _cancel(self, transfer: RdmaTransfer) -> None:
        with self._lock:
            self._stop(transfer, TransferCancelled("cancelled by this side"))

    def _stop(self, transfer: RdmaTransfer, error: TransferError) -> None:
        """Stop posting a transfer's pieces; it ends when those in flight have completed."""
        if transfer.error is not None or transfer not in self._transfers:
            return
        transfer.error = error
        transfer.stopped_at = time.monotonic()
        for connection in self._connections:
            transfer.unfinished -= connection.window.drop(transfer)
        self._end_if_done(transfer)
        self._endpoint.progress.wake_by(transfer.stopped_at + STUCK_SECONDS)

    def _end_if_done(self, transfer: RdmaTransfer) -> None:
        if transfer.unfinished == 0:
            self._end(transfer)

    def _end(self, transfer: RdmaTransfer) -> None:
        self._transfers.discard(transfer)
        transfer.handle.part_ended(transfer.error)

    def _stripe(self, run: PieceRun[RdmaTransfer]) -> None:
        """Queue a run's pieces on the usable connections, and post as many as the windows
        permit."""
        usable = [
            connection
            for connection in self._connections
            if connection.state is ConnectionState.READY
        ] or [
            connection
            for connection in self._connections
            if connection.state is ConnectionState.REOPENING
        ]
        if not usable:
            self.lost(PeerLost("no connection to the peer works any more"))
            return
        parts = stripe(run.transfer.ends, run.start, run.stop, len(usable))
        # start at another connection each time, so that small transfers use all of them, too
        self._turn += 1
        for at, (start, stop) in enumerate(parts):
            usable[(self._turn + at) % len(usable)].window.add(PieceRun(run.transfer, start, stop))
        for connection in usable:
            self._post_queued(connection)

    def _post_queued(self, connection: RdmaConnection) -> None:
        if connection.state is not ConnectionState.READY:
            return
        fault = connection.post_queued()
        if fault is not None:
            self._on_fault(connection, fault)

    def _on_event(self, connection: RdmaConnection) -> None:
        """Handle a connection's completions; called on the progress thread."""
        with self._lock:
            if connection.state is not ConnectionState.READY:
                return
            done, fault = connection.take_completions()
            for transfer, count in done:
                transfer.unfinished -= count
                self._end_if_done(transfer)
            if fault is not None:
                self._on_fault(connection, fault)
            else:
                self._post_queued(connection)

    def _on_fault(self, connection: RdmaConnection, fault: ConnectionFault) -> None:
        """Destroy a broken connection's queue pair; fail the transfer that caused it, if any, and
        post the others' pieces again."""
        self._close_connection(connection)
        left = connection.take_unfinished()  # before new pieces are posted to the connection
        if fault.refused is not None:
            self._reopen(connection)
            self._on_refused(fault.refused, fault.reason)
        else:
            connection.mark_down(time.monotonic())
            logger.warning(
                "rdma connection %d on %s: %s", connection.number, connection.nic.name, fault.reason
            )
        self._resume(left)

    def _resume(self, runs: list[PieceRun[RdmaTransfer]]) -> None:
        """Post the pieces again that a closed connection had not completed."""
        for run in runs:
            if run.transfer.error is None:
                self._stripe(run)
            elif run.transfer in self._transfers:
                run.transfer.unfinished -= len(run)
                self._end_if_done(run.transfer)

    def _break_stuck(self, now: float) -> None:
        stuck = [w for w in self._transfers if w.error and now >= w.stopped_at + STUCK_SECONDS]
        for connection in self._connections:
            if connection.state is ConnectionState.READY and any(
                connection.window.holds(transfer) for transfer in stuck
            ):
                logger.warning(
                    "rdma connection %d does not drain; it gets a new queue pair", connection.number
                )
                self._close_connection(connection)
                left = connection.take_unfinished()
                self._reopen(connection)
                self._resume(left)

    def _retry_down(self, now: float) -> None:
        """Reopen the connections whose cooldown has passed."""
        for connection in self._connections:
            if connection.state is ConnectionState.DOWN and now >= connection.retry_at:
                self._reopen(connection)

    def _reopen(self, connection: RdmaConnection) -> None:
        """Replace a connection's queue pair: create a new one, and request a new one of the
        peer."""
        try:
            call = ReopenQueuePair(connection.number, connection.open())
        except TransportUnavailable as exc:
            self._reopen_failed(connection, exc)
            return
        self._session.start_request(encode(call)).add_done_callback(
            lambda reply: self._reopened(connection, reply)
        )

    def _reopened(self, connection: RdmaConnection, reply: Future[bytes]) -> None:
        """Called on the session's thread, or immediately if the session is over."""
        with self._lock:
            if self._error is not None:
                self._close_connection(connection)
                return
            try:
                (remote,) = decode(reply.result(), QueuePairsOpened).queue_pairs
                connection.connect(remote)
            except (TransferError, ValueError) as exc:
                self._reopen_failed(connection, exc)
                return
            self._watch(connection)
            self._post_queued(connection)

    def _reopen_failed(self, connection: RdmaConnection, error: Exception) -> None:
        connection.mark_down(time.monotonic())
        logger.warning("rdma connection %d can't be reopened: %s", connection.number, error)
        self._resume(connection.take_unfinished())

    def _watch(self, connection: RdmaConnection) -> None:
        self._endpoint.progress.add(connection.fd, lambda: self._on_event(connection))

    def _close_connection(self, connection: RdmaConnection) -> None:
        if connection.fd >= 0:
            self._endpoint.progress.remove(connection.fd)
        connection.close()

    def _on_refused(self, transfer: RdmaTransfer, reason: str) -> None:
        """Fail a transfer that the peer's NIC rejected. The reason is known once all pending
        notifications of the peer were processed."""
        if transfer.error is not None:
            return
        transfer.unfinished += 1  # keeps it from ending until the reason is known
        transfer.awaits_reason = True
        self._stop(transfer, TransferError(f"the peer's NIC rejected the transfer: {reason}"))
        self._session.ping().add_done_callback(lambda _: self._end_refused(transfer))

    def _end_refused(self, transfer: RdmaTransfer) -> None:
        with self._lock:
            if not transfer.awaits_reason or transfer not in self._transfers:
                return
            transfer.awaits_reason = False
            transfer.error = self._refusal_reason(transfer) or transfer.error
            transfer.unfinished -= 1
            self._end_if_done(transfer)

    def _refusal_reason(self, transfer: RdmaTransfer) -> TransferError | None:
        """Look up the transfer's remote spans again, among the regions that are registered now."""
        try:
            index, positions = self._session.regions.locate(
                transfer.spans.remote, transfer.spans.nbytes
            )
        except TransferError as exc:
            return exc
        if index.touched(positions) != transfer.remote_keys.touched(transfer.remote_at):
            return RegionRevoked("the region was revoked in mid-transfer, and registered again")
        return None

    def _look_up_remote_keys(self, regions: list[int]) -> list[RegionKeys | None]:
        return [
            decode_region_keys(data, self._remote_nics) if data else None
            for data in self._session.regions.attachments(regions)
        ]
