"""One connection to a peer, and the thread that works through what is to be moved over it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable

from mooncake_hal.errors import PeerLost, TransferCancelled, TransferError
from mooncake_hal.transports.tcp import wire
from mooncake_hal.transports.tcp.streams import (
    INLINE_SECONDS,
    Operation,
    Outcome,
    Streams,
    failure,
)
from mooncake_hal.transports.transfers import RunningTransfer

Dial = Callable[[float], socket.socket]
"""Opens and authenticates a connection before a deadline; raises TransferError."""


class Part:
    """What one lane moves of a transfer."""

    def __init__(self, transfer: RunningTransfer, operation: Operation) -> None:
        self.operation = operation
        self.transfer = transfer
        self._lane: Lane | None = None
        self._is_over = False
        self._lock = threading.Lock()

    def enter(self, lane: Lane) -> bool:
        """Say that a lane begins to move it; False if it has been stopped before."""
        with self._lock:
            self._lane = lane
            return not self._is_over

    def end(self, error: TransferError | None) -> None:
        """Say that no more of it moves."""
        with self._lock:
            over, self._is_over = self._is_over, True
        if not over:
            self.transfer.part_ended(error)

    def stop(self) -> None:
        """Make its lane break it off; if none has begun, it ends here."""
        self.operation.stop = 1
        with self._lock:
            lane = self._lane
        if lane is None:
            self.end(TransferCancelled("stopped before it began"))
        else:
            lane.interrupt(self)


class Lane:
    """A connection that is opened when it is needed, and again after it was broken.

    Args:
        streams: what moves the bytes.
        dial: see ``Dial``.
        connection: the first connection, if there is one already.
        name: of the thread.
    """

    def __init__(
        self, streams: Streams, dial: Dial, connection: socket.socket | None, name: str
    ) -> None:
        self.pending = 0
        self.error: BaseException | None = None
        self.operation = Operation()
        self.claimed_key: int | None = None
        self._streams = streams
        self._dial = dial
        self._connection = connection
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # held by whoever uses the connection
        self._guard = threading.Lock()  # of `pending`, `_connection` and `_current`
        self._current: Part | None = None
        self._unfinished: Part | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, part: Part) -> None:
        """Let the thread move a part."""
        with self._guard:
            self.pending += 1
        self._tasks.put(lambda: self._move(part, 0.0))

    def claim(self) -> bool:
        """Take the connection for the caller's thread, if the lane is idle and connected."""
        if not self._streams.runs_inline or self.pending or self._connection is None:
            return False
        if not self._turn.acquire(blocking=False):
            return False
        with self._guard:
            self.pending += 1
        return True

    def unclaim(self) -> None:
        """Give a claimed connection back."""
        with self._guard:
            self.pending -= 1
        self.claimed_key = None
        self._turn.release()

    def move_claimed(self, part: Part) -> None:
        """Move a part over the claimed connection and give that back.

        What takes longer than INLINE_SECONDS is left to the lane's thread.
        """
        try:
            self._move(part, INLINE_SECONDS)
        finally:
            self._turn.release()

    def move_one(self, write: bool, local: int, remote: int, nbytes: int, timeout: float) -> int:
        """Move one piece over the claimed connection, which stays claimed; returns an Outcome.

        What becomes of AGAIN is the caller's to say: see ``leave_unfinished``.
        """
        connection = self._connection
        if connection is None:
            return Outcome.CLOSED
        operation = self.operation
        operation.fd = connection.fileno()
        operation.write = write
        return self._streams.run_one(operation, local, remote, nbytes, timeout)

    def leave_unfinished(self, part: Part) -> None:
        """Let the thread finish what ``move_one`` began; gives the claimed connection back."""
        self.operation = Operation()
        part.enter(self)
        with self._guard:
            self._current = part
        self._unfinished = part
        self.claimed_key = None
        self._tasks.put(_nothing)  # wakes the thread, which resumes first
        self._turn.release()

    def fail_claimed(self, outcome: int) -> None:
        """Give a claimed connection back after an outcome that it can't be used after."""
        if outcome != Outcome.DONE:
            self._drop()
        self.unclaim()

    def interrupt(self, part: Part | None) -> None:
        """Break the connection under a part, if it is the one that moves; None means any."""
        with self._guard:
            if self._connection is not None and part in (None, self._current):
                wire.hang_up(self._connection)

    def close(self) -> None:
        """Break off what moves, fail what waits, and join the thread. Idempotent."""
        self._is_closed = True
        self.interrupt(None)
        self._tasks.put(None)
        self._thread.join()
        with self._turn:
            self._drop()

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                with self._turn:
                    self._resume()
                    task()
            except Exception as exc:  # noqa: BLE001  thread top: kept, raised by the next transfer
                self.error = self.error or exc
        with self._turn:
            self._resume()

    def _resume(self) -> None:
        """Finish what a caller began and left; it has the connection."""
        part, self._unfinished = self._unfinished, None
        if part is not None:
            self._run(part, 0.0)

    def _move(self, part: Part, seconds: float) -> None:
        try:
            connection = self._open(part.transfer.deadline)
        except TransferError as exc:
            self._finish(part, exc)
            return
        if not part.enter(self):
            self._finish(part, None)
            return
        with self._guard:
            self._current = part
        self._streams.begin(part.operation, connection)
        self._run(part, seconds)

    def _run(self, part: Part, seconds: float) -> None:
        """Move a part, or as much of it as ``seconds`` allow (0: all); then it is unfinished."""
        connection = self._connection
        assert connection is not None
        outcome = self._streams.run(part.operation, connection, seconds)
        if outcome == Outcome.AGAIN:
            self._unfinished = part
            self._tasks.put(_nothing)  # wakes the thread, which resumes first
            return
        if outcome != Outcome.DONE:
            self._drop()
        if outcome == Outcome.LATE:
            self._finish(part, part.transfer.late())
        else:
            self._finish(part, failure(part.operation, outcome))

    def _finish(self, part: Part, error: TransferError | None) -> None:
        with self._guard:
            self._current = None
            self.pending -= 1
        part.end(error)

    def _open(self, deadline: float) -> socket.socket:
        if self._is_closed:
            raise PeerLost("tcp: this side closed the connection")
        if self._connection is None:
            connection = self._dial(deadline - time.monotonic())
            with self._guard:
                self._connection = connection
        return self._connection

    def _drop(self) -> None:
        with self._guard:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _nothing() -> None:
    """Do nothing but wake a thread."""
