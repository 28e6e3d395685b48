"""The client's side of the tcp transport: transfers are divided into parts, which several
connections move."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

import numpy as np

from mooncake_hal.errors import PeerLost, RegionRevoked, TransferCancelled, TransferError
from mooncake_hal.session.listener import hang_up
from mooncake_hal.session.regions import RegionTable, check_spans
from mooncake_hal.transport import Spans
from mooncake_hal.transports.spans import limit_spans, split_spans
from mooncake_hal.transports.tcp.native_streams import (
    INLINE_SECONDS,
    MAX_SPANS,
    Operation,
    ReplyStatus,
    StreamOutcome,
    Streams,
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

Dial = Callable[[float], socket.socket]
"""Opens and authenticates a connection within the given number of seconds; raises TransferError."""


class TransferPart:
    """The part of a transfer that one connection moves."""

    def __init__(self, transfer: RunningTransfer, operation: Operation) -> None:
        self.operation = operation
        self.transfer = transfer
        self._connection: PeerConnection | None = None
        self._is_over = False
        self._lock = threading.Lock()

    def enter(self, connection: PeerConnection) -> bool:
        """Mark the part as started by a connection; returns False if it was stopped before."""
        with self._lock:
            self._connection = connection
            return not self._is_over

    def end(self, error: TransferError | None) -> None:
        """Mark the part as ended: no more of its bytes move."""
        with self._lock:
            over, self._is_over = self._is_over, True
        if not over:
            self.transfer.part_ended(error)

    def stop(self) -> None:
        """Make its connection abort the part; a part that has not been started ends here."""
        self.operation.stop = 1
        with self._lock:
            connection = self._connection
        if connection is None:
            self.end(TransferCancelled("stopped before it began"))
        else:
            connection.interrupt(self)


class PeerConnection:
    """A connection and its thread. It is opened on demand and reopened after it broke.

    Args:
        streams: moves the bytes.
        dial: opens the connection; see ``Dial``.
        sock: its socket if it is open already.
        name: name of the thread.
    """

    def __init__(self, streams: Streams, dial: Dial, sock: socket.socket | None, name: str) -> None:
        self.pending = 0
        self.error: BaseException | None = None
        self.operation = Operation()
        self.claimed_key: int | None = None
        self._streams = streams
        self._dial = dial
        self._sock = sock
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._use_lock = threading.Lock()  # held while the connection is used
        self._state_lock = threading.Lock()  # guards `pending`, `_sock` and `_current`
        self._current: TransferPart | None = None
        self._unfinished: TransferPart | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, part: TransferPart) -> None:
        """Queue a part for the thread."""
        with self._state_lock:
            self.pending += 1
        self._tasks.put(lambda: self._move(part, 0.0))

    def claim(self) -> bool:
        """Claim the connection for the caller's thread if it is open and idle."""
        if not self._streams.runs_inline or self.pending or self._sock is None:
            return False
        if not self._use_lock.acquire(blocking=False):
            return False
        with self._state_lock:
            self.pending += 1
        return True

    def unclaim(self) -> None:
        """Release a claimed connection."""
        with self._state_lock:
            self.pending -= 1
        self.claimed_key = None
        self._use_lock.release()

    def move_claimed(self, part: TransferPart) -> None:
        """Move a part over the claimed connection and release the connection.

        After INLINE_SECONDS, the connection's thread takes over the rest.
        """
        try:
            self._move(part, INLINE_SECONDS)
        finally:
            self._use_lock.release()

    def move_one(self, write: bool, local: int, remote: int, nbytes: int, timeout: float) -> int:
        """Move one piece over the claimed connection, which stays claimed; returns a StreamOutcome.

        On AGAIN, the caller continues with ``leave_unfinished``.
        """
        sock = self._sock
        if sock is None:
            return StreamOutcome.CLOSED
        operation = self.operation
        operation.fd = sock.fileno()
        operation.write = write
        return self._streams.run_one(operation, local, remote, nbytes, timeout)

    def leave_unfinished(self, part: TransferPart) -> None:
        """Release the claimed connection and let its thread finish what ``move_one`` started."""
        self.operation = Operation()
        part.enter(self)
        with self._state_lock:
            self._current = part
        self._unfinished = part
        self.claimed_key = None
        self._tasks.put(_wake_only)  # wakes the thread, which resumes first
        self._use_lock.release()

    def fail_claimed(self, outcome: int) -> None:
        """Release a claimed connection after a failure; drops it unless ``outcome`` is DONE."""
        if outcome != StreamOutcome.DONE:
            self._drop(discards_unsent=True)
        self.unclaim()

    def interrupt(self, part: TransferPart | None) -> None:
        """Shut the connection down if it is moving ``part``; None: whatever it is moving."""
        with self._state_lock:
            if self._sock is not None and part in (None, self._current):
                hang_up(self._sock)

    def close(self) -> None:
        """Abort the current part, fail the queued ones, and join the thread. Idempotent."""
        self._is_closed = True
        self.interrupt(None)
        self._tasks.put(None)
        self._thread.join()
        with self._use_lock:
            self._drop()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                with self._use_lock:
                    self._resume()
                    task()
            except Exception as exc:  # noqa: BLE001  thread top: kept, raised by the next transfer
                self.error = self.error or exc
        with self._use_lock:
            self._resume()

    def _resume(self) -> None:
        """Finish the part, if any, that a caller's thread started and left on the connection."""
        part, self._unfinished = self._unfinished, None
        if part is not None:
            self._run(part, 0.0)

    def _move(self, part: TransferPart, seconds: float) -> None:
        try:
            sock = self._open(part.transfer.deadline)
        except TransferError as exc:
            self._finish(part, exc)
            return
        if not part.enter(self):
            self._finish(part, None)
            return
        with self._state_lock:
            self._current = part
        self._streams.begin(part.operation, sock)
        self._run(part, seconds)

    def _run(self, part: TransferPart, seconds: float) -> None:
        """Move a part for up to ``seconds`` (0: until it is done); the rest, if any, is left to the
        connection's thread."""
        sock = self._sock
        assert sock is not None
        outcome = self._streams.run(part.operation, sock, seconds)
        if outcome == StreamOutcome.AGAIN:
            self._unfinished = part
            self._tasks.put(_wake_only)  # wakes the thread, which resumes first
            return
        if outcome != StreamOutcome.DONE:
            self._drop(discards_unsent=True)
        if outcome == StreamOutcome.LATE:
            self._finish(part, part.transfer.late())
        else:
            self._finish(part, failure(part.operation, outcome))

    def _finish(self, part: TransferPart, error: TransferError | None) -> None:
        with self._state_lock:
            self._current = None
            self.pending -= 1
        part.end(error)

    def _open(self, deadline: float) -> socket.socket:
        if self._is_closed:
            raise PeerLost("tcp: this side closed the connection")
        if self._sock is None:
            sock = self._dial(deadline - time.monotonic())
            with self._state_lock:
                self._sock = sock
        return self._sock

    def _drop(self, *, discards_unsent: bool = False) -> None:
        """Close the connection; after a failure without what the kernel has yet to send of a write,
        which could arrive for another minute, when the memory may have another use."""
        with self._state_lock:
            sock, self._sock = self._sock, None
        if sock is None:
            return
        if discards_unsent:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        sock.close()


def _wake_only() -> None:
    """Do nothing but wake a thread."""


_NO_LINGER = struct.pack("ii", 1, 0)
"""The kernel's ``struct linger``: closing resets the connection."""

INLINE_BYTES = 64 * 1024
"""Transfers of up to this many bytes are moved in the caller's thread if a connection is idle."""

SPLIT_BYTES = 1024 * 1024
"""Transfers of at least this many bytes are divided over the connections."""

_UINT64 = np.dtype(np.uint64)


class TcpPeer:
    """Moves spans over several connections to one endpoint.

    Args:
        connections: the connections; the first one is open. Closed with the peer.
        local: this side's regions.
        on_close: called once, when the peer has been closed.
    """

    def __init__(
        self,
        connections: list[PeerConnection],
        local: RegionTable,
        on_close: Callable[[TcpPeer], object],
    ) -> None:
        self._connections = connections
        self._local = local
        self._on_close = on_close
        self._running: dict[RunningTransfer, frozenset[int]] = {}
        self._error: TransferError | None = None
        self._lock = threading.Lock()

    def read(self, spans: Spans, *, timeout: float) -> RunningTransfer | FinishedTransfer:
        return self._move(spans, timeout, write=False)

    def write(self, spans: Spans, *, timeout: float) -> RunningTransfer | FinishedTransfer:
        return self._move(spans, timeout, write=True)

    def close(self) -> None:
        with self._lock:
            if self._error is not None:
                return
            self._error = PeerLost("tcp: this side closed the connection")
            running = list(self._running)
        for transfer in running:
            transfer.abort(self._error)
        for connection in self._connections:
            connection.close()
        self._on_close(self)

    def forget_local(self, key: int) -> None:
        """Fail and drain the transfers of a region that this side has just revoked."""
        with self._lock:
            using = [transfer for transfer, keys in self._running.items() if key in keys]
        for transfer in using:
            transfer.abort(RegionRevoked("this side revoked the local region"))
        while any(connection.claimed_key == key for connection in self._connections):
            time.sleep(INLINE_SECONDS / 2)  # it stays claimed for at most INLINE_SECONDS

    def _move(
        self, spans: Spans, timeout: float, *, write: bool
    ) -> RunningTransfer | FinishedTransfer:
        nbytes = spans.nbytes
        if (
            nbytes.size == spans.local.size == spans.remote.size == 1
            and nbytes.dtype is spans.local.dtype is spans.remote.dtype is _UINT64
            and 0 < (size := nbytes.item()) <= INLINE_BYTES
        ):
            connection = self._claim()
            if connection is not None:
                span = (spans.local.item(), spans.remote.item(), size)
                return self._move_one(connection, span, timeout, write=write)
        check_spans(spans)
        return self._move_many(spans, timeout, write=write) if len(spans) else DONE

    def _claim(self) -> PeerConnection | None:
        for connection in self._connections:
            if connection.claim():
                return connection
        return None

    def _move_one(
        self, connection: PeerConnection, span: tuple[int, int, int], timeout: float, *, write: bool
    ) -> RunningTransfer | FinishedTransfer:
        """Move one small piece in the caller's thread, over a claimed connection."""
        local, remote, nbytes = span
        try:
            with self._lock:
                if self._error is not None:
                    raise self._error
                connection.claimed_key = key = self._local.find(local, nbytes)
        except TransferError:
            connection.unclaim()
            raise
        outcome = connection.move_one(write, local, remote, nbytes, timeout)
        operation = connection.operation
        if outcome == StreamOutcome.DONE and operation.status == ReplyStatus.OK:
            connection.unclaim()
            return DONE
        if outcome == StreamOutcome.AGAIN:
            return self._continue_in_background(connection, key)
        error = (
            deadline_error(timeout)
            if outcome == StreamOutcome.LATE
            else failure(operation, outcome)
        )
        connection.fail_claimed(outcome)
        return FinishedTransfer(error)

    def _continue_in_background(
        self, connection: PeerConnection, key: int
    ) -> RunningTransfer | FinishedTransfer:
        """Turn the operation that the caller's thread started into a transfer that the connection's
        thread finishes."""
        deadline = connection.operation.deadline_ns / 1e9
        transfer = RunningTransfer(1, deadline, lambda: part.stop(), self._forget)
        part = TransferPart(transfer, connection.operation)
        with self._lock:
            error = self._error
            if error is None:
                self._running[transfer] = frozenset((key,))
        if error is not None:  # closed meanwhile: the connection's thread accepts no more work
            connection.fail_claimed(StreamOutcome.STOPPED)
            return FinishedTransfer(error)
        connection.leave_unfinished(part)
        return transfer

    def _move_many(self, spans: Spans, timeout: float, *, write: bool) -> RunningTransfer:
        total = spans.total_bytes
        shares = [spans] if total < SPLIT_BYTES else split_spans(spans, len(self._connections))
        shares = [piece for share in shares for piece in limit_spans(share, MAX_SPANS)]
        parts: list[TransferPart] = []

        def stop() -> None:
            for part in parts:
                part.stop()

        transfer = RunningTransfer(len(shares), deadline_after(timeout), stop, self._forget)
        parts += [
            TransferPart(transfer, make_operation(share, write=write, deadline=transfer.deadline))
            for share in shares
        ]
        self._admit(transfer, spans)
        self._start(parts, is_small=total <= INLINE_BYTES)
        return transfer

    def _admit(self, transfer: RunningTransfer, spans: Spans) -> None:
        """Check the local spans and record the transfer for ``forget_local``, atomically."""
        with self._lock:
            if self._error is not None:
                raise self._error
            for connection in self._connections:
                if connection.error is not None:
                    raise TransferError("tcp: a connection's thread failed") from connection.error
            if len(spans) == 1:
                keys = frozenset((self._local.find(spans.local.item(), spans.nbytes.item()),))
            else:
                index, at = self._local.find_all(spans.local, spans.nbytes)
                keys = index.touched(at)
            self._running[transfer] = keys

    def _start(self, parts: list[TransferPart], *, is_small: bool) -> None:
        if is_small and (connection := self._claim()) is not None:
            connection.move_claimed(parts[0])
            return
        connections = sorted(self._connections, key=lambda connection: connection.pending)
        for at, part in enumerate(parts):
            connections[at % len(connections)].submit(part)

    def _forget(self, transfer: RunningTransfer) -> None:
        with contextlib.suppress(KeyError):
            del self._running[transfer]
