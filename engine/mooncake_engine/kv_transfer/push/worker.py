"""The push connector beside a rank's KV pool: sends what steps compute, lets peers write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mooncake_engine.execution.extension import ExtensionContext, LayerDone
from mooncake_engine.kv_transfer.facts import RankFacts
from mooncake_engine.kv_transfer.push.lane import Due, LaneServices, PushLane, PushSession
from mooncake_engine.kv_transfer.push.plan import PushSides, plan_push
from mooncake_engine.kv_transfer.push.rank_messages import (
    EndPush,
    MeetRanks,
    PushReport,
    StartPush,
    StopPush,
    encode,
    to_rank,
)
from mooncake_engine.kv_transfer.push.session import Portion, PromptProgress
from mooncake_engine.kv_transfer.rank_messages import ConnectPeer, ForgetPeer
from mooncake_engine.kv_transfer.rank_worker import RankWorker
from mooncake_engine.scheduling.plan import StepPlan
from mooncake_hal.errors import PeerLost
from mooncake_hal.kv.plan import Movement, PeerSpans
from mooncake_hal.transport import Peer


class PushWorker(RankWorker):
    """One rank's half of MooncakeLayerwiseConnector; see ``RankWorker``.

    A session begins with the first that comes: the request's step, or the peer's grant. It ends
    when its request has ended and its report is out.
    """

    def __init__(self, context: ExtensionContext) -> None:
        super().__init__(context)
        shard = context.pool.shard
        self._layers = (shard.layer_start, shard.layer_stop)
        self._sessions: dict[str, PushSession] = {}
        self._lanes: dict[str, PushLane] = {}
        self._peers: dict[str, tuple[RankFacts, ...]] = {}
        self._siblings: tuple[RankFacts, ...] = ()
        self._announce()

    # --- from the core -----------------------------------------------------------------------

    def _obey(self, message: bytes) -> None:
        command = to_rank.decode(message)
        if isinstance(command, MeetRanks):
            self._siblings = command.ranks
        elif isinstance(command, ConnectPeer):
            self._peers[command.engine_id] = command.ranks
        elif isinstance(command, ForgetPeer):
            self._forget(command.engine_id)
        else:
            self._steer(command)

    def _steer(self, command: StartPush | StopPush | EndPush) -> None:
        name = command.request_id
        if isinstance(command, StartPush):
            self._start(self._session(name), command)
        elif isinstance(command, EndPush):
            self._end(self._session(name), command)
        elif name in self._sessions or not command.has_ended:
            self._stop(self._session(name), command.reason)

    def _start(self, session: PushSession, order: StartPush) -> None:
        if session.is_reported:
            return
        if order.engine_id not in self._peers:
            self._stop(session, f"instance {order.engine_id} was given up")
            return
        session.start = order
        session.lane = self._lane(order.engine_id)
        for due in session.parked:
            session.lane.put(due)
        session.parked.clear()

    def _stop(self, session: PushSession, reason: str) -> None:
        session.error = session.error or reason
        session.parked.clear()
        if session.lane is None:
            self._report(session)
        else:
            session.lane.put(Due(session, None))

    def _end(self, session: PushSession, order: EndPush) -> None:
        session.has_ended = True
        if session.is_reported:
            del self._sessions[session.request_id]
        elif order.is_complete:
            for portion in session.progress.end_pass(order.num_tokens, order.block_ids):
                self._put(Due(session, portion))
            self._put(Due(session, None))
        else:
            self._stop(session, "the prefill ended before its KV was complete")

    def _forget(self, engine_id: str) -> None:
        """Stop all that goes to a peer, then drop its connections."""
        self._peers.pop(engine_id, None)
        lane = self._lanes.pop(engine_id, None)
        if lane is None:
            return
        for session in list(self._sessions.values()):
            if session.lane is lane:
                self._stop(session, f"instance {engine_id} was given up")
        lane.retire(partial(self._transports.forget, engine_id))

    # --- steps -------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> LayerDone | None:
        """See ``WorkerExtension``."""
        with self._lock:
            for session in self._sessions.values():
                self._put_rest(session, session.progress.end_step())
            for admitted in plan.admitted:
                if admitted.sends_kv:
                    session = self._session(admitted.request_id)
                    session.progress.begin_pass(admitted.block_ids)
            active = []
            for sequence in plan.sequences:
                running = self._sessions.get(sequence.request_id)
                if running is not None and running.progress.pass_number:
                    stop = sequence.start + sequence.count
                    running.progress.begin_step(stop, sequence.new_block_ids)
                    active.append(running)
        return partial(self._layer_done, active) if active else None

    def _layer_done(self, active: Sequence[PushSession], layer: int) -> None:
        event = self.context.backend.runtime.event(self.context.device)
        event.record()
        with self._lock:
            for session in active:
                portion = session.progress.layer_done(layer)
                if portion is not None:
                    self._put(Due(session, portion, event))

    def _put_rest(self, session: PushSession, portions: Sequence[Portion]) -> None:
        """What no hook spoke of: the step has been enqueued, and may not be over."""
        for portion in portions:
            event = self.context.backend.runtime.event(self.context.device)
            event.record()
            self._put(Due(session, portion, event))

    def _put(self, due: Due) -> None:
        session = due.session
        if session.error is not None and due.portion is not None:
            return
        if session.lane is None:
            session.parked.append(due)
        else:
            session.lane.put(due)

    def _session(self, request_id: str) -> PushSession:
        session = self._sessions.get(request_id)
        if session is None:
            session = PushSession(request_id, PromptProgress(self._layers))
            self._sessions[request_id] = session
        return session

    # --- lanes -------------------------------------------------------------------------------

    def _lane(self, engine_id: str) -> PushLane:
        lane = self._lanes.get(engine_id)
        if lane is None:
            context = self.context
            services = LaneServices(
                plan=partial(self._plan, self._peers[engine_id]),
                connect=partial(self._connect, engine_id),
                disconnect=partial(self._transports.forget, engine_id),
                close=self._close_session,
                bind=partial(context.backend.runtime.bind_thread, context.device),
                fail=context.fail,
                timeout_s=self._timeout_s,
            )
            lane = PushLane(f"kv-push-{context.rank}", services)
            self._lanes[engine_id] = lane
        return lane

    def _plan(self, readers: Sequence[RankFacts], movement: Movement) -> list[PeerSpans]:
        sides = PushSides(
            self.context.pool.geometry,
            tuple(rank.placement for rank in self._siblings),
            tuple(rank.placement for rank in readers),
        )
        return plan_push(sides, self.context.rank, movement)

    def _connect(self, engine_id: str, rank: int) -> Peer:
        ranks = self._peers.get(engine_id)
        if ranks is None:
            raise PeerLost(f"instance {engine_id} was given up")
        return self._transports.peer(engine_id, rank, ranks[rank].endpoints)

    def _close_session(self, session: PushSession) -> None:
        with self._lock:
            self._report(session)

    def _report(self, session: PushSession) -> None:
        """Say, once, that nothing more is written for this request."""
        if not session.is_reported:
            session.is_reported = True
            report = PushReport(
                session.request_id,
                session.error,
                dict(session.written),
                session.seconds,
                session.may_land,
            )
            self.context.emit(encode(report))
        if session.has_ended:
            self._sessions.pop(session.request_id, None)

    def _drain(self) -> None:
        with self._lock:
            lanes, self._lanes = list(self._lanes.values()), {}
        for lane in lanes:
            lane.close()
