"""Prefill side of push: opens the push at D, sends keepalives, reports completion. Loop thread
only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_kv.connector import REFUSED, LeaseEnded, SendRefused
from mooncake_kv.connector_scheduler import ConnectorContext, TransferCounts
from mooncake_kv.errors import HandshakeRefused, KVTransferError, LeaseLost
from mooncake_kv.liveness import MAX_PUSH_INTERVAL_S, Keepalive, KeepaliveInterval
from mooncake_kv.params import FirstToken, PushTarget, RemoteKV
from mooncake_kv.peers import PeerInstance, PeerTable
from mooncake_kv.protocol import (
    AnyMessage,
    LeaseReply,
    LeaseStatus,
    Pushed,
    PushFailed,
    PushOpen,
    StatusReply,
    StatusRequest,
    Writer,
)
from mooncake_kv.ranks import (
    EndPush,
    PushReport,
    RankGroup,
    StartPush,
    StopPush,
    spread_of,
)

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Pause between attempts to report how a push ended, in seconds."""


@dataclass(slots=True)
class _Push:
    """One request that is being pushed.

    Args:
        target: the blocks to write to.
        writer: our identity, as sent to the peer.
        last_contact: when we sent the last request that the peer answered.
        first_token: the sampled token, once the prefill is complete.
        reports: reports of the ranks that have drained, by rank.
        error: why not all KV is sent; None if there is no reason.
        is_cancelled: whether that is no failure, because the request has ended.
        is_open: whether the peer has granted the push.
        has_ended: whether the scheduler is done with the request.
        is_acknowledged: whether the peer knows how the push ended, or can't be reached.
    """

    target: PushTarget
    writer: Writer
    last_contact: float
    first_token: FirstToken | None = None
    reports: dict[int, PushReport] = field(default_factory=dict)
    error: str | None = None
    is_cancelled: bool = False
    is_open: bool = False
    has_ended: bool = False
    is_acknowledged: bool = False

    @property
    def remote(self) -> RemoteKV:
        """The reserved blocks, and the instance that reserved them."""
        return self.target.remote


class PushSender:
    """The requests that this instance pushes.

    Args:
        context: services of the connector.
        ranks: the workers of this instance.
        peers: the decode instances.
        address: host and port of our side channel.
    """

    def __init__(
        self,
        context: ConnectorContext,
        ranks: RankGroup,
        peers: PeerTable,
        address: tuple[str, int],
    ) -> None:
        self._context = context
        self.counts = TransferCounts()
        self._ranks = ranks
        self._peers = peers
        self._host, self._port = address
        self._pushes: dict[str, _Push] = {}
        interval = KeepaliveInterval(context.lease_s, MAX_PUSH_INTERVAL_S)
        self._keepalive = Keepalive(interval, self._renew, context.spawn, context.has_stalled)

    @property
    def num_sending(self) -> int:
        """Number of requests that are running, or whose end the peer has not acknowledged."""
        return len(self._pushes)

    def begin(self, request_id: str, target: PushTarget) -> None:
        """Start a request: open the push at its decode instance while the prompt is computed."""
        self.counts.transfers += 1
        writer = Writer(self._context.instance.engine_id, request_id, self._host, self._port)
        push = self._pushes[request_id] = _Push(target, writer, self._context.clock())
        self._peers.hold(target.remote)
        self._context.spawn(self._open(request_id, push), request_id)

    def complete(self, end: EndPush, first_token: FirstToken) -> None:
        """Complete a prefill; ``LeaseEnded`` follows when its blocks can be freed."""
        push = self._pushes[end.request_id]
        push.first_token = first_token
        self._end(push, end)

    def cancel(self, request_id: str) -> None:
        """Stop sending a request that has ended; ``LeaseEnded`` follows when its blocks can be
        freed."""
        push = self._pushes.get(request_id)
        if push is None:
            return  # it is drained already
        push.is_cancelled = push.is_cancelled or push.error is None
        if push.has_ended:
            self._fail(request_id, push, "the request was aborted")
            return
        push.error = push.error or "the request ended before its prefill was complete"
        self._end(push, EndPush(request_id, is_complete=False))

    def abort(self, request_id: str, reason: str) -> None:
        """Fail a push, even an unknown one. The peer is not notified; it asks when the keepalives
        stop."""
        push = self._pushes.get(request_id)
        if push is None:  # nothing of it was ever sent
            self._context.post(LeaseEnded(request_id))
            return
        self._fail(request_id, push, reason)
        if self._is_drained(push):
            push.is_acknowledged = True
            self._settle(request_id, push)

    def _end(self, push: _Push, end: EndPush) -> None:
        push.has_ended = True
        self._ranks.broadcast(end)
        self._settle(end.request_id, push)

    def report(self, rank: int, report: PushReport) -> None:
        """Process the report of a rank that has drained; a failure stops the other ranks."""
        push = self._pushes.get(report.request_id)
        if push is None or rank in push.reports:
            return
        push.reports[rank] = report
        if report.error is not None:
            if report.is_refused:
                self._context.incompatible.note(push.remote.engine_id, report.error)
            self._fail(report.request_id, push, report.error)
        if self._is_drained(push):
            self._count_end(report.request_id, push)
            self._context.spawn(self._report_end(report.request_id, push), report.request_id)
            self._settle(report.request_id, push)

    def _count_end(self, request_id: str, push: _Push) -> None:
        """Count the end of a push, before its blocks are freed: vLLM reads the counters in the step
        that frees them, which may be the last one for a long time."""
        if push.error is None:
            self.counts.nbytes += sum(sum(r.written.values()) for r in push.reports.values())
            self.counts.seconds += max(report.seconds for report in push.reports.values())
        elif not push.is_cancelled:
            self.counts.failures += 1
            level = self._context.incompatible.level(push.remote.engine_id)
            logger.log(level, "pushing %s failed: %s", request_id, push.error)

    def _fail(self, request_id: str, push: _Push, reason: str) -> None:
        if push.error is None:
            push.error = reason
            self._ranks.broadcast(StopPush(request_id, reason, push.has_ended))

    def _settle(self, request_id: str, push: _Push) -> None:
        """Free the blocks once all ranks are drained; forget the request once the peer has
        acknowledged its end."""
        if push.has_ended and self._is_drained(push):
            self._context.post(LeaseEnded(request_id))
            if push.is_acknowledged and self._pushes.pop(request_id, None) is not None:
                self._peers.release(push.remote)

    async def _open(self, request_id: str, push: _Push) -> None:
        try:
            peer = self._peers.get(push.remote)
            await peer.handshake()
            self._peers.forget_predecessors(push.remote)
            peer.check_claims(push.remote)
            # taken before the request, as in _renew; a failure to answer fails the push
            push.last_contact = self._context.clock()
            status = await self._request_grant(peer, push)
            if status is not LeaseStatus.HELD:
                raise LeaseLost(
                    f"the decode instance did not grant the push: it answered {status.value}"
                )
            if self._is_overdue(push):
                raise LeaseLost("the decode instance took longer than a lease to grant the push")
        except KVTransferError as exc:
            level = self._context.incompatible.level(push.remote.engine_id)
            logger.log(level, "request %s can't be pushed: %s", request_id, exc)
            self._fail(request_id, push, str(exc))
            if isinstance(exc, HandshakeRefused):
                self._context.post(SendRefused(request_id, REFUSED))
            return
        if push.error is None:
            push.is_open = True
            self._keepalive.wake_for(push.remote)
            self._ranks.broadcast(_start_order(request_id, push))

    async def _request_grant(self, peer: PeerInstance, push: _Push) -> LeaseStatus:
        def make(ticket: int) -> PushOpen:
            target = push.target
            return PushOpen(ticket, push.remote.request_id, push.writer, target.prompt_digest)

        try:
            return await self._ask(peer, make)
        except HandshakeRefused:  # the handshake had succeeded: the peer has forgotten us since
            await peer.say_hello()
            return await self._ask(peer, make)

    async def _report_end(self, request_id: str, push: _Push) -> None:
        """Report how the push ended, until the peer acknowledges it or its lease must be over."""
        make = _ending(push)
        deadline = self._context.clock() + max(self._context.lease_s, push.remote.lease_s or 0.0)
        while not push.is_acknowledged:
            try:
                await self._ask(self._peers.get(push.remote), make)
                push.is_acknowledged = True
            except KVTransferError as exc:
                push.is_acknowledged = (
                    isinstance(exc, HandshakeRefused) or self._context.clock() > deadline
                )
                if push.is_acknowledged:
                    logger.warning("could not report the end of pushing %s: %s", request_id, exc)
                else:  # an invalid address fails immediately, so pause between attempts
                    await asyncio.sleep(RETRY_PAUSE_S)
        self._settle(request_id, push)

    def status(self, message: StatusRequest) -> StatusReply:
        """Answer a decode instance that has received no keepalive for its pushes."""
        known = [name for name in message.request_ids if name in self._pushes]
        ended = [name for name in known if self._is_drained(self._pushes[name])]
        endings = (_ending(self._pushes[name])(message.ticket) for name in ended)
        running = tuple(name for name in known if name not in ended)
        return StatusReply(
            message.ticket, self._context.instance.engine_id, running, tuple(endings)
        )

    def _is_drained(self, push: _Push) -> bool:
        return len(push.reports) == self._ranks.num_ranks

    async def _ask(self, peer: PeerInstance, make: Callable[[int], AnyMessage]) -> LeaseStatus:
        return (await peer.client.ask(make, LeaseReply)).status

    async def keep_alive(self) -> None:
        """Send every decode instance one keepalive for all pushes in flight to it, periodically,
        until cancelled.

        A push that has ended is left out: a peer that missed its end will ask.
        """
        await self._keepalive.run(self._in_flight)

    def _in_flight(self) -> dict[str, _Push]:
        """The pushes that peers have granted and that are not drained."""
        return {
            request_id: push
            for request_id, push in self._pushes.items()
            if push.is_open and not self._is_drained(push)
        }

    async def _renew(self, group: dict[str, _Push], within_s: float) -> None:
        names = {push.remote.request_id: name for name, push in group.items()}
        # the peer counts from our last message, which it may receive as early as this
        sent_at = self._context.clock()
        try:
            peer = self._peers.get(next(iter(group.values())).remote)
            lost = await peer.renew(tuple(names), within_s)
        except KVTransferError as exc:
            self._drop_silent(group, str(exc))
            return
        for push in group.values():
            push.last_contact = sent_at
        for remote_id in lost:
            name = names[remote_id]
            if not self._is_drained(group[name]):  # it may have ended during the request
                self._fail(name, group[name], "the decode instance no longer waits for it")

    def _drop_silent(self, group: dict[str, _Push], reason: str) -> None:
        """Fail the pushes to a peer that has been silent for a lease. It may be gone, and another
        process may take its place; or it may declare us dead and reuse the blocks."""
        for request_id, push in group.items():
            if self._is_overdue(push):
                self._fail(request_id, push, reason)

    def _is_overdue(self, push: _Push) -> bool:
        """Whether the peer has been silent for longer than the shorter of both sides' leases."""
        lease_s = min(self._context.lease_s, push.remote.lease_s or self._context.lease_s)
        return self._context.clock() - push.last_contact > lease_s

    async def drain(self, timeout_s: float) -> bool:
        """Stop all pushes, and wait until no rank writes and all peers have acknowledged it, or
        until the timeout. Returns whether no rank writes any more."""
        for request_id, push in list(self._pushes.items()):
            self._fail(request_id, push, "the prefill instance is shutting down")
        deadline = self._context.clock() + timeout_s
        while self._context.clock() < deadline:
            if all(push.is_acknowledged for push in self._pushes.values()):
                return True
            await asyncio.sleep(0.01)
        logger.warning("%d pushes had not ended at shutdown", len(self._pushes))
        return all(self._is_drained(push) for push in self._pushes.values())


def _start_order(request_id: str, push: _Push) -> StartPush:
    remote = push.remote
    return StartPush(
        request_id,
        remote.engine_id,
        remote.block_ids,
        push.target.start,
        remote.num_tokens,
        spread_of(remote.request_id),
    )


def _ending(push: _Push) -> Callable[[int], Pushed | PushFailed]:
    """Return a function that makes, for a ticket, the message that reports how a push ended."""
    request_id = push.remote.request_id
    if push.error is not None:
        reason = push.error
        may_still_arrive = any(report.may_still_arrive for report in push.reports.values())
        return lambda ticket: PushFailed(ticket, request_id, push.writer, reason, may_still_arrive)
    assert push.first_token is not None, "ranks are done only after the prefill"
    token = push.first_token
    written = tuple(
        (rank, reader, nbytes)
        for rank, report in sorted(push.reports.items())
        for reader, nbytes in sorted(report.written.items())
    )
    return lambda ticket: Pushed(ticket, request_id, push.writer, written, token)
