"""Per-rank worker of the push connector: sends each layer's KV as soon as it is computed.

One thread per peer instance sends all portions that are due as one batch. While a batch is in
flight the model keeps computing, and the portions that become due meanwhile form the next batch. So
a fast transport sends layer by layer, a slow one sends larger pieces, and computation never waits
for either. Batches are sent one after another, so a portion that replaces an earlier one arrives
after it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue

from mooncake_hal.backend import Event
from mooncake_hal.errors import HalError, NoTransportFits, PeerLost
from mooncake_hal.kv.transfer_plan import BlockTransfer, PeerSpans
from mooncake_hal.transport import Peer, Transfer
from mooncake_kv.connector_worker import (
    ConnectorWorker,
    LayerDone,
    PushStep,
    RankContext,
    single_thread,
)
from mooncake_kv.errors import ConnectorDead, Fatal
from mooncake_kv.handshake import RankMetadata
from mooncake_kv.push_progress import (
    InstancePair,
    Portion,
    PromptProgress,
    merge_portions,
    plan_push,
)
from mooncake_kv.ranks import (
    ConnectPeer,
    ConvertRopeOrder,
    EndPush,
    ForgetPeer,
    LoadReport,
    LocalRanks,
    PushReport,
    StartPush,
    StopPush,
    decode_to_rank,
    encode,
)

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class PushSession:
    """A request whose KV this rank sends.

    Args:
        request_id: the request.
        progress: tracks which portions are due; guarded by the worker's lock.
        start: the peer's grant; None until it arrives.
        send_thread: the thread of the peer; None until the grant arrives.
        parked: tasks that wait for the grant.
        written: bytes written by the peer's rank, in the current pass over the prompt.
        written_pass: number of that pass.
        seconds: seconds spent in transfers.
        error: reason of the first failure, or why it was stopped; None otherwise.
        may_still_arrive: whether a write failed in flight, whose data may still arrive at the peer.
        is_refused: whether it failed because no transport connects the two instances.
        has_ended: whether the scheduler side has sent ``EndPush``.
        is_reported: whether the ``PushReport`` has been sent.
    """

    request_id: str
    progress: PromptProgress
    start: StartPush | None = None
    send_thread: SendThread | None = None
    parked: list[SendTask] = field(default_factory=list)
    written: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    written_pass: int = 0
    seconds: float = 0.0
    error: str | None = None
    may_still_arrive: bool = False
    is_refused: bool = False
    has_ended: bool = False
    is_reported: bool = False

    def count(self, pass_number: int, reader: int, nbytes: int) -> None:
        """Count written bytes; a new pass over the prompt resets the counts."""
        if pass_number != self.written_pass:
            self.written.clear()
            self.written_pass = pass_number
        self.written[reader] += nbytes


@dataclass(frozen=True, slots=True, eq=False)
class SendTask:
    """Work for a send thread: a portion to send after its event; None ends the session."""

    session: PushSession
    portion: Portion | None
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class SendServices:
    """The services that a send thread uses.

    Args:
        plan: plans a transfer: spans per peer rank.
        connect: returns the thread's connection to a peer's rank; raises TransferError.
        disconnect: closes the thread's connections, after a failure and at its end.
        close: reports a session that has ended or failed, and is drained.
        bind: makes the device current on the thread.
        fail: receives the exception that killed the thread.
        timeout_s: timeout of a transfer, in seconds.
    """

    plan: Callable[[BlockTransfer], list[PeerSpans]]
    connect: Callable[[int], Peer]
    disconnect: Callable[[], None]
    close: Callable[[PushSession], None]
    bind: Callable[[], None]
    fail: Callable[[BaseException], None]
    timeout_s: float


@dataclass(slots=True, eq=False)
class _Write:
    """A write in flight."""

    session: PushSession
    pass_number: int
    reader: int
    nbytes: int
    transfer: Transfer


class SendThread:
    """The thread that sends to one peer instance, and its queue.

    Args:
        name: name of the thread.
        services: see ``SendServices``.
    """

    def __init__(self, name: str, services: SendServices) -> None:
        self._services = services
        self._queue: SimpleQueue[SendTask | None] = SimpleQueue()
        self._is_stopping = False
        self._is_broken = False  # a transfer failed, so a connection to the peer may be broken
        self._is_retired = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: SendTask) -> None:
        """Queue a task behind all earlier ones. Any thread; returns immediately."""
        self._queue.put(task)

    def retire(self) -> None:
        """Stop once the queued tasks are done, then close the thread's connections. Returns
        immediately."""
        self._is_retired = True
        self._queue.put(None)

    def close(self) -> None:
        """Stop after the batch in flight, and wait for the thread to end. Idempotent."""
        self._is_stopping = True
        self._queue.put(None)
        self._thread.join(self._services.timeout_s + JOIN_TIMEOUT_S)

    def _run(self) -> None:
        """Top of the thread."""
        try:
            self._services.bind()
            is_last = False
            while not (is_last or self._is_stopping):
                batch = self._take_batch()
                is_last = None in batch
                self._send_batch([task for task in batch if task is not None])
            if self._is_retired:
                self._services.disconnect()
        except ConnectorDead as exc:
            self._services.fail(exc)
        except BaseException as exc:
            self._services.fail(ConnectorDead(Fatal.RANK_THREAD_ENDED, exc))
            raise

    def _take_batch(self) -> list[SendTask | None]:
        """Wait for a task, and take everything that is queued."""
        batch = [self._queue.get()]
        try:
            while True:
                batch.append(self._queue.get_nowait())
        except Empty:
            return batch

    def _send_batch(self, batch: list[SendTask]) -> None:
        """Send a batch, wait until it is drained, then report the sessions that ended with it. If a
        connection breaks, the writes in flight are drained first, and later sessions are sent over
        new connections."""
        started = time.monotonic()
        by_session: defaultdict[PushSession, list[SendTask]] = defaultdict(list)
        for task in batch:
            by_session[task.session].append(task)
        writes: list[_Write] = []
        for session, tasks in by_session.items():
            writes += self._send(session, tasks)
            if self._is_broken:
                self._drain_all(writes)
        self._drain_all(writes)
        for session, tasks in by_session.items():
            session.seconds += time.monotonic() - started
            if session.error is not None or any(task.portion is None for task in tasks):
                self._services.close(session)

    def _drain_all(self, writes: list[_Write]) -> None:
        """Wait until the writes in flight have ended; closes the connections if one is broken."""
        for write in writes:
            self._wait_for(write)
        writes.clear()
        if self._is_broken:
            self._is_broken = False
            self._services.disconnect()

    def _send(self, session: PushSession, tasks: list[SendTask]) -> list[_Write]:
        """Start the transfers of one session; a failure is the session's, not the thread's."""
        writes: list[_Write] = []
        try:
            for task in tasks:
                if task.event is not None:
                    task.event.synchronize()
            portions = [task.portion for task in tasks if task.portion is not None]
            for portion in merge_portions(portions):
                if session.error is None and portion.pass_number == session.progress.pass_number:
                    self._send_portion(session, portion, writes)
        except Exception as exc:  # noqa: BLE001  # any error fails this session only
            self._fail(session, exc)
        return writes

    def _send_portion(self, session: PushSession, portion: Portion, writes: list[_Write]) -> None:
        block_transfer = _requested_part(session, portion)
        if block_transfer is None:
            return
        for plan in self._services.plan(block_transfer):
            peer = self._services.connect(plan.peer)
            transfer = peer.write(plan.spans, timeout=self._services.timeout_s)
            nbytes = plan.spans.total_bytes
            writes.append(_Write(session, portion.pass_number, plan.peer, nbytes, transfer))

    def _wait_for(self, write: _Write) -> None:
        try:
            write.transfer.wait()
        except Exception as exc:  # noqa: BLE001  # any error fails this session only
            _drain(write.transfer)
            write.session.may_still_arrive = True
            self._fail(write.session, exc)
        else:
            write.session.count(write.pass_number, write.reader, write.nbytes)

    def _fail(self, session: PushSession, exc: Exception) -> None:
        if not isinstance(exc, HalError):
            logger.error("sending the KV of %s failed", session.request_id, exc_info=exc)
        session.error = session.error or f"{type(exc).__name__}: {exc}"
        session.is_refused = session.is_refused or isinstance(exc, NoTransportFits)
        self._is_broken = True


def _drain(transfer: Transfer) -> None:
    """Drain a write that failed.

    Raises:
        ConnectorDead: it can't be drained, so it may still be writing.
    """
    try:
        transfer.cancel()
    except Exception as exc:
        raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, exc) from exc


def _requested_part(session: PushSession, portion: Portion) -> BlockTransfer | None:
    """The part of a portion that the peer asked for; None if it asked for no part of it."""
    order = session.start
    assert order is not None, "a session gets its thread with its order"
    first, last = max(portion.tokens[0], order.start), min(portion.tokens[1], order.stop)
    if first >= last:
        return None
    return BlockTransfer(
        portion.block_ids,
        order.remote_blocks,
        (first, last),
        portion.layers,
        order.spread,
        order.stop,
    )


class PushWorker(ConnectorWorker):
    """One rank's half of MooncakeLayerwiseConnector; see ``ConnectorWorker``.

    A session is created by the request's first step or by the peer's grant, whichever comes first.
    It is removed when its request has ended and its report is sent.
    """

    def __init__(self, context: RankContext) -> None:
        self._conversions = single_thread(f"kv-rope-{context.rank}", context.bind_thread)
        super().__init__(context)
        shard = context.memory.shard
        self._layers = (shard.layer_start, shard.layer_stop)
        self._unit = context.memory.geometry.unit
        self._sessions: dict[str, PushSession] = {}
        self._send_threads: dict[str, SendThread] = {}
        # Each send thread has connections of its own: one that is retired may outlive its peer's
        # return, and closes them when it is done.
        self._connection_numbers = count()
        self._peers: dict[str, tuple[RankMetadata, ...]] = {}
        self._siblings: tuple[RankMetadata, ...] = ()
        self._announce()

    def _execute(self, message: bytes) -> None:
        order = decode_to_rank(message)
        if isinstance(order, LocalRanks):
            self._siblings = order.ranks
        elif isinstance(order, ConnectPeer):
            self._peers[order.engine_id] = order.ranks
        elif isinstance(order, ForgetPeer):
            self._forget(order.engine_id)
        elif isinstance(order, ConvertRopeOrder):
            self._conversions.submit(self._convert_rope, order)
        elif isinstance(order, StartPush | StopPush | EndPush):
            self._control_session(order)

    def _convert_rope(self, order: ConvertRopeOrder) -> None:
        """Top of the thread that converts the rope rows of KV that peers have pushed; reports the
        outcome, whatever happens."""
        began, error = time.monotonic(), None
        try:
            self.convert_rope_order(order.local_blocks, (order.start, order.stop), order.order)
        except Exception as exc:
            logger.exception("converting the rope rows of %s failed", order.request_id)
            error = f"its rope rows can't be converted: {exc!r}"
        seconds = time.monotonic() - began
        self.context.emit(encode(LoadReport(order.request_id, error, 0, seconds)))

    def _control_session(self, order: StartPush | StopPush | EndPush) -> None:
        request_id = order.request_id
        if isinstance(order, StartPush):
            self._start(self._session(request_id), order)
        elif isinstance(order, EndPush):
            self._end(self._session(request_id), order)
        elif request_id in self._sessions or not order.has_ended:
            self._stop(self._session(request_id), order.reason)

    def _start(self, session: PushSession, order: StartPush) -> None:
        if session.is_reported:
            return
        if order.engine_id not in self._peers:
            self._stop(session, f"instance {order.engine_id} was dropped")
            return
        try:
            session.send_thread = self._send_thread(order.engine_id)
        except RuntimeError as exc:  # the host has no thread left
            self._stop(session, f"its send thread can't be started: {exc}")
            return
        session.start = order
        for task in session.parked:
            session.send_thread.put(task)
        session.parked.clear()

    def _stop(self, session: PushSession, reason: str) -> None:
        session.error = session.error or reason
        session.parked.clear()
        if session.send_thread is None:
            self._report(session)
        else:
            session.send_thread.put(SendTask(session, None))

    def _end(self, session: PushSession, order: EndPush) -> None:
        session.has_ended = True
        if session.is_reported:
            del self._sessions[session.request_id]
        elif order.is_complete:
            for portion in session.progress.end_pass(order.num_tokens, order.block_ids):
                self._put(SendTask(session, portion))
            self._put(SendTask(session, None))
        else:
            self._stop(session, "the prefill ended before its KV was complete")

    def _forget(self, engine_id: str) -> None:
        """Stop all sessions with a peer, then close its connections."""
        self._peers.pop(engine_id, None)
        thread = self._send_threads.pop(engine_id, None)
        if thread is None:
            return
        for session in list(self._sessions.values()):
            if session.send_thread is thread:
                self._stop(session, f"instance {engine_id} was dropped")
        thread.retire()

    def begin_step(self, steps: Sequence[PushStep]) -> LayerDone | None:
        with self._lock:
            active = []
            for step in steps:
                if step.restart is not None:
                    self._session(step.request_id).progress.begin_pass(step.restart)
                running = self._sessions.get(step.request_id)
                if running is not None and running.progress.pass_number:
                    running.progress.begin_step(step.stop, step.new_block_ids)
                    active.append(running)
        return partial(self._layer_done, active) if active else None

    def end_step(self) -> None:
        with self._lock:
            for session in self._sessions.values():
                self._put_remaining(session, session.progress.end_step())

    def _layer_done(self, active: Sequence[PushSession], layer: int) -> None:
        event = self.context.make_event()
        event.record()
        with self._lock:
            for session in active:
                portion = session.progress.layer_done(layer)
                if portion is not None:
                    self._put(SendTask(session, portion, event))

    def _put_remaining(self, session: PushSession, portions: Sequence[Portion]) -> None:
        """Queue the layers that had no callback. The step's kernels are enqueued, and may still be
        running, so each portion waits for an event."""
        for portion in portions:
            event = self.context.make_event()
            event.record()
            self._put(SendTask(session, portion, event))

    def _put(self, task: SendTask) -> None:
        session = task.session
        if session.error is not None and task.portion is not None:
            return
        if session.send_thread is None:
            session.parked.append(task)
        else:
            session.send_thread.put(task)

    def _session(self, request_id: str) -> PushSession:
        session = self._sessions.get(request_id)
        if session is None:
            session = PushSession(request_id, PromptProgress(self._layers, self._unit))
            self._sessions[request_id] = session
        return session

    def _send_thread(self, engine_id: str) -> SendThread:
        thread = self._send_threads.get(engine_id)
        if thread is None:
            context, connection = self.context, next(self._connection_numbers)
            services = SendServices(
                plan=partial(self._plan, self._peers[engine_id]),
                connect=partial(self._connect, engine_id, connection),
                disconnect=partial(self._transports.forget, engine_id, connection),
                close=self._close_session,
                bind=context.bind_thread,
                fail=context.fail,
                timeout_s=self._timeout_s,
            )
            thread = SendThread(f"kv-push-{context.rank}", services)
            self._send_threads[engine_id] = thread
        return thread

    def _plan(
        self, readers: Sequence[RankMetadata], block_transfer: BlockTransfer
    ) -> list[PeerSpans]:
        pair = InstancePair(
            self.context.memory.geometry,
            tuple(rank.shard_spec for rank in self._siblings),
            tuple(rank.shard_spec for rank in readers),
        )
        return plan_push(pair, self.context.rank, block_transfer)

    def _connect(self, engine_id: str, connection: int, rank: int) -> Peer:
        ranks = self._peers.get(engine_id)
        if ranks is None:
            raise PeerLost(f"instance {engine_id} was dropped")
        endpoints = ranks[rank].endpoints
        return self._transports.peer(engine_id, rank, endpoints, connection=connection)

    def _close_session(self, session: PushSession) -> None:
        with self._lock:
            self._report(session)

    def _report(self, session: PushSession) -> None:
        """Report, once, that nothing more is written for this request."""
        if not session.is_reported:
            session.is_reported = True
            report = PushReport(
                session.request_id,
                session.error,
                dict(session.written),
                session.seconds,
                session.may_still_arrive,
                session.is_refused,
            )
            self.context.emit(encode(report))
        if session.has_ended:
            self._sessions.pop(session.request_id, None)

    def _drain(self) -> None:
        with self._lock:
            threads, self._send_threads = list(self._send_threads.values()), {}
        for thread in threads:
            thread.close()
        self._conversions.shutdown(wait=True)
