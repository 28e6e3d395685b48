"""The thread that writes to one peer instance: whatever is due goes out in one batch.

While a batch is on its way the model computes on, and what becomes due meanwhile is the next
batch. So a fast transport sends layer by layer, a slow one in larger pieces, and computing never
waits. Batches follow each other: a portion that replaces an earlier one arrives after it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from mooncake_engine.kv_transfer.push.rank_messages import StartPush
from mooncake_engine.kv_transfer.push.session import Portion, PromptProgress, merge_portions
from mooncake_hal.backend import Event
from mooncake_hal.errors import HalError
from mooncake_hal.kv.plan import Movement, PeerSpans
from mooncake_hal.transport import Peer, Transfer

JOIN_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class PushSession:
    """A request that this rank sends.

    Args:
        request_id: which.
        progress: what is due; guarded by the worker's lock.
        may_land: a write failed under way; what it had sent may arrive at the peer yet.
    """

    request_id: str
    progress: PromptProgress
    start: StartPush | None = None
    lane: PushLane | None = None
    parked: list[Due] = field(default_factory=list)
    written: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    written_pass: int = 0
    seconds: float = 0.0
    error: str | None = None
    may_land: bool = False
    has_ended: bool = False
    is_reported: bool = False

    def count(self, pass_number: int, reader: int, nbytes: int) -> None:
        """Book written bytes; a new pass over the prompt begins the books anew."""
        if pass_number != self.written_pass:
            self.written.clear()
            self.written_pass = pass_number
        self.written[reader] += nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Due:
    """Work for a lane: a portion to send once its event has passed; None ends the session."""

    session: PushSession
    portion: Portion | None
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class LaneServices:
    """What a lane works with.

    Args:
        plan: spans per peer rank of a movement.
        connect: the connection to a peer's rank; raises TransferError.
        disconnect: forget all connections to the peer, after a failure.
        close: reports a session that has ended or failed; it is drained.
        bind: makes the device current in the lane's thread.
        fail: told what killed the lane.
        timeout_s: deadline of a transfer.
    """

    plan: Callable[[Movement], list[PeerSpans]]
    connect: Callable[[int], Peer]
    disconnect: Callable[[], None]
    close: Callable[[PushSession], None]
    bind: Callable[[], None]
    fail: Callable[[BaseException], None]
    timeout_s: float


@dataclass(slots=True, eq=False)
class _Sent:
    session: PushSession
    pass_number: int
    reader: int
    nbytes: int
    transfer: Transfer


class PushLane:
    """One peer's thread and queue.

    Args:
        name: of the thread.
        services: what it works with.
    """

    def __init__(self, name: str, services: LaneServices) -> None:
        self._services = services
        self._queue: SimpleQueue[Due | None] = SimpleQueue()
        self._is_stopping = False
        self._after: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, due: Due) -> None:
        """Send this after all that came before. Any thread; returns at once."""
        self._queue.put(due)

    def retire(self, after: Callable[[], None]) -> None:
        """Stop when all that was put is done, then do that. Returns at once."""
        self._after = after
        self._queue.put(None)

    def close(self) -> None:
        """Stop after the batch that is on its way, and wait for that. Idempotent."""
        self._is_stopping = True
        self._queue.put(None)
        self._thread.join(self._services.timeout_s + JOIN_TIMEOUT_S)

    def _run(self) -> None:
        """Top of the thread."""
        try:
            self._services.bind()
            is_last = False
            while not (is_last or self._is_stopping):
                batch = self._take()
                is_last = None in batch
                self._carry([due for due in batch if due is not None])
            if self._after is not None:
                self._after()
        except BaseException as exc:
            self._services.fail(exc)
            raise

    def _take(self) -> list[Due | None]:
        """Wait for work, and take all there is."""
        batch = [self._queue.get()]
        try:
            while True:
                batch.append(self._queue.get_nowait())
        except Empty:
            return batch

    def _carry(self, batch: list[Due]) -> None:
        """Send a batch, wait until it is drained, then report what ended with it."""
        started = time.monotonic()
        by_session: defaultdict[PushSession, list[Due]] = defaultdict(list)
        for due in batch:
            by_session[due.session].append(due)
        sent: list[_Sent] = []
        for session, dues in by_session.items():
            sent += self._send(session, dues)
        for item in sent:
            self._await(item)
        for session, dues in by_session.items():
            session.seconds += time.monotonic() - started
            if session.error is not None or any(due.portion is None for due in dues):
                self._services.close(session)

    def _send(self, session: PushSession, dues: list[Due]) -> list[_Sent]:
        """Start the transfers of one session; a failure is the session's, not the lane's."""
        sent: list[_Sent] = []
        try:
            for due in dues:
                if due.event is not None:
                    due.event.synchronize()
            portions = [due.portion for due in dues if due.portion is not None]
            for portion in merge_portions(portions):
                if session.error is None and portion.pass_number == session.progress.pass_number:
                    self._send_portion(session, portion, sent)
        except HalError as exc:
            self._fail(session, exc)
        return sent

    def _send_portion(self, session: PushSession, portion: Portion, sent: list[_Sent]) -> None:
        movement = _movement(session, portion)
        if movement is None:
            return
        for plan in self._services.plan(movement):
            peer = self._services.connect(plan.peer)
            transfer = peer.write(plan.spans, timeout=self._services.timeout_s)
            nbytes = plan.spans.total_bytes
            sent.append(_Sent(session, portion.pass_number, plan.peer, nbytes, transfer))

    def _await(self, item: _Sent) -> None:
        try:
            item.transfer.wait()
        except HalError as exc:
            item.transfer.cancel()
            item.session.may_land = True
            self._fail(item.session, exc)
        else:
            item.session.count(item.pass_number, item.reader, item.nbytes)

    def _fail(self, session: PushSession, exc: HalError) -> None:
        session.error = session.error or f"{type(exc).__name__}: {exc}"
        self._services.disconnect()


def _movement(session: PushSession, portion: Portion) -> Movement | None:
    """The part of a portion that the peer asked for; None if that is nothing."""
    order = session.start
    assert order is not None, "a session gets its lane with its order"
    first, last = max(portion.tokens[0], order.start), min(portion.tokens[1], order.stop)
    if first >= last:
        return None
    return Movement(
        portion.block_ids, order.remote_blocks, (first, last), portion.layers, order.spread
    )
