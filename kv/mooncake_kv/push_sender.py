"""Prefill side of push: opens the push at D, sends keepalives, reports completion. Loop thread
only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_kv.connector import LeaseEnded
from mooncake_kv.connector_scheduler import ConnectorContext, TransferCounts
from mooncake_kv.errors import HandshakeRefused, KVTransferError, LeaseLost
from mooncake_kv.liveness import LONGEST_PUSH_PAUSE_S, Keepalive, KeepaliveInterval
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
class _Send:
    """One request that is being pushed.

    Args:
        target: the blocks to write to.
        writer: our identity, as sent to the peer.
        last_heard: when we sent the last request that the peer answered.
        first_token: the sampled token, once the prefill is complete.
        reports: reports of the ranks that have drained, by rank.
        error: reason of the failure; None if there is none.
        is_open: whether the peer has granted the push.
        has_ended: whether the scheduler is done with the request.
        is_acknowledged: whether the peer knows how the push ended, or can't be reached.
    """

    target: PushTarget
    writer: Writer
    last_heard: float
    first_token: FirstToken | None = None
    reports: dict[int, PushReport] = field(default_factory=dict)
    error: str | None = None
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
        self._sends: dict[str, _Send] = {}
        interval = KeepaliveInterval(context.lease_s, LONGEST_PUSH_PAUSE_S)
        self._keepalive = Keepalive(interval, self._renew, context.spawn, context.has_stalled)

    @property
    def num_sending(self) -> int:
        """Number of requests that are running, or whose end the peer has not acknowledged."""
        return len(self._sends)

    def begin(self, request_id: str, target: PushTarget) -> None:
        """Start a request: open the push at its decode instance while the prompt is computed."""
        self.counts.transfers += 1
        writer = Writer(self._context.instance.engine_id, request_id, self._host, self._port)
        send = self._sends[request_id] = _Send(target, writer, self._context.clock())
        self._peers.hold(target.remote)
        self._context.spawn(self._open(request_id, send), request_id)

    def complete(self, end: EndPush, first_token: FirstToken) -> None:
        """Complete a prefill; ``LeaseEnded`` follows when its blocks can be freed."""
        send = self._sends[end.request_id]
        send.first_token = first_token
        self._end(send, end)

    def cancel(self, request_id: str) -> None:
        """Stop sending a request; ``LeaseEnded`` follows when its blocks can be freed."""
        send = self._sends.get(request_id)
        if send is None:
            return  # it is drained already
        if send.has_ended:
            self._fail(request_id, send, "the request was aborted")
            return
        send.error = send.error or "the request ended before its prefill was complete"
        self._end(send, EndPush(request_id, is_complete=False))

    def give_up(self, request_id: str, reason: str) -> None:
        """Fail a push, even an unknown one. The peer is not notified; it asks when the keepalives
        stop."""
        send = self._sends.get(request_id)
        if send is None:  # nothing of it was ever sent
            self._context.post(LeaseEnded(request_id))
            return
        self._fail(request_id, send, reason)
        if self._is_drained(send):
            send.is_acknowledged = True
            self._settle(request_id, send)

    def _end(self, send: _Send, end: EndPush) -> None:
        send.has_ended = True
        self._ranks.broadcast(end)
        self._settle(end.request_id, send)

    def report(self, rank: int, report: PushReport) -> None:
        """Process the report of a rank that has drained; a failure stops the other ranks."""
        send = self._sends.get(report.request_id)
        if send is None or rank in send.reports:
            return
        send.reports[rank] = report
        if report.error is not None:
            self._fail(report.request_id, send, report.error)
        if self._is_drained(send):
            self._context.spawn(self._tell(report.request_id, send), report.request_id)
            self._settle(report.request_id, send)

    def _fail(self, request_id: str, send: _Send, reason: str) -> None:
        if send.error is None:
            send.error = reason
            self._ranks.broadcast(StopPush(request_id, reason, send.has_ended))

    def _settle(self, request_id: str, send: _Send) -> None:
        """Free the blocks once all ranks are drained; forget the request once the peer has
        acknowledged its end."""
        if send.has_ended and self._is_drained(send):
            self._context.post(LeaseEnded(request_id))
            if send.is_acknowledged and self._sends.pop(request_id, None) is not None:
                self._peers.release(send.remote)

    async def _open(self, request_id: str, send: _Send) -> None:
        try:
            peer = self._peers.get(send.remote)
            await peer.shake_hands()
            self._peers.forget_predecessors(send.remote)
            peer.check_claims(send.remote)
            send.last_heard = (
                self._context.clock()
            )  # taken before the request, as in _renew; a failure to answer fails the push
            status = await self._ask_for_entry(peer, send)
            if status is not LeaseStatus.HELD:
                raise LeaseLost(f"the decode instance answers {status.value}: it let nobody in")
            if self._is_overdue(send):
                raise LeaseLost("the decode instance let us in, and took a lease to say so")
        except KVTransferError as exc:
            level = self._context.incompatible.level(send.remote.engine_id)
            logger.log(level, "request %s can't be pushed: %s", request_id, exc)
            self._fail(request_id, send, str(exc))
            return
        if send.error is None:
            send.is_open = True
            self._keepalive.hasten(send.remote)
            self._ranks.broadcast(_start_order(request_id, send))

    async def _ask_for_entry(self, peer: PeerInstance, send: _Send) -> LeaseStatus:
        def make(ticket: int) -> PushOpen:
            target = send.target
            return PushOpen(ticket, send.remote.request_id, send.writer, target.prompt_digest)

        try:
            return await self._ask(peer, make)
        except HandshakeRefused:  # the handshake had succeeded: the peer has forgotten us since
            await peer.introduce()
            return await self._ask(peer, make)

    async def _tell(self, request_id: str, send: _Send) -> None:
        """Report how the push ended, until the peer acknowledges it or its lease must be over."""
        make = _ending(send)
        if send.error is not None:
            self.counts.failures += 1
            level = self._context.incompatible.level(send.remote.engine_id)
            logger.log(level, "pushing %s failed: %s", request_id, send.error)
        else:
            self.counts.nbytes += sum(sum(r.written.values()) for r in send.reports.values())
            self.counts.seconds += max(report.seconds for report in send.reports.values())
        give_up = self._context.clock() + max(self._context.lease_s, send.remote.lease_s or 0.0)
        while not send.is_acknowledged:
            try:
                await self._ask(self._peers.get(send.remote), make)
                send.is_acknowledged = True
            except KVTransferError as exc:
                send.is_acknowledged = (
                    isinstance(exc, HandshakeRefused) or self._context.clock() > give_up
                )
                if send.is_acknowledged:
                    logger.warning("could not tell the end of %s: %s", request_id, exc)
                    self._peers.forget(send.remote, "it could not be told how a push ended")
                else:  # an invalid address fails immediately, so pause between attempts
                    await asyncio.sleep(RETRY_PAUSE_S)
        self._settle(request_id, send)

    def status(self, message: StatusRequest) -> StatusReply:
        """Answer a decode instance that has received no keepalive for its pushes."""
        known = [name for name in message.request_ids if name in self._sends]
        ended = [name for name in known if self._is_drained(self._sends[name])]
        endings = (_ending(self._sends[name])(message.ticket) for name in ended)
        running = tuple(name for name in known if name not in ended)
        return StatusReply(
            message.ticket, self._context.instance.engine_id, running, tuple(endings)
        )

    def _is_drained(self, send: _Send) -> bool:
        return len(send.reports) == self._ranks.num_ranks

    async def _ask(self, peer: PeerInstance, make: Callable[[int], AnyMessage]) -> LeaseStatus:
        return (await peer.client.ask(make, LeaseReply)).status

    async def keep_alive(self) -> None:
        """Send every decode instance one keepalive for all pushes in flight to it, periodically,
        until cancelled.

        A push that has ended is left out: a peer that missed its end will ask.
        """
        await self._keepalive.give(self._under_way)

    def _under_way(self) -> dict[str, _Send]:
        """The pushes that peers have granted and that are not drained."""
        return {
            request_id: send
            for request_id, send in self._sends.items()
            if send.is_open and not self._is_drained(send)
        }

    async def _renew(self, group: dict[str, _Send], within_s: float) -> None:
        names = {send.remote.request_id: name for name, send in group.items()}
        asked = (
            self._context.clock()
        )  # the peer counts from our last message, which it may receive as early as this
        try:
            peer = self._peers.get(next(iter(group.values())).remote)
            lost = await peer.renew(tuple(names), within_s)
        except KVTransferError as exc:
            self._drop_silent(group, str(exc))
            return
        for send in group.values():
            send.last_heard = asked
        for remote_id in lost:
            name = names[remote_id]
            if not self._is_drained(group[name]):  # it may have ended during the request
                self._fail(name, group[name], "the decode instance no longer waits for it")

    def _drop_silent(self, group: dict[str, _Send], reason: str) -> None:
        """Fail the pushes to a peer that has been silent for a lease. It may be gone, and another
        process may take its place; or it may declare us dead and reuse the blocks."""
        for request_id, send in group.items():
            if self._is_overdue(send):
                self._fail(request_id, send, reason)

    def _is_overdue(self, send: _Send) -> bool:
        """Whether the peer has been silent for longer than the shorter of both sides' leases."""
        lease_s = min(self._context.lease_s, send.remote.lease_s or self._context.lease_s)
        return self._context.clock() - send.last_heard > lease_s

    async def drain(self, timeout_s: float) -> bool:
        """Stop all pushes, and wait until no rank writes and all peers have acknowledged it, or
        until the timeout. Returns whether no rank writes any more."""
        for request_id, send in list(self._sends.items()):
            self._fail(request_id, send, "the prefill instance shuts down")
        give_up = self._context.clock() + timeout_s
        while self._context.clock() < give_up:
            if all(send.is_acknowledged for send in self._sends.values()):
                return True
            await asyncio.sleep(0.01)
        logger.warning("%d pushes had not ended at shutdown", len(self._sends))
        return all(self._is_drained(send) for send in self._sends.values())


def _start_order(request_id: str, send: _Send) -> StartPush:
    remote = send.remote
    return StartPush(
        request_id,
        remote.engine_id,
        remote.block_ids,
        send.target.start,
        remote.num_tokens,
        spread_of(remote.request_id),
    )


def _ending(send: _Send) -> Callable[[int], Pushed | PushFailed]:
    """Return a function that makes, for a ticket, the message that reports how a push ended."""
    name = send.remote.request_id
    if send.error is not None:
        reason = send.error
        may_land = any(report.may_land for report in send.reports.values())
        return lambda ticket: PushFailed(ticket, name, send.writer, reason, may_land)
    assert send.first_token is not None, "ranks are done only after the prefill"
    token = send.first_token
    written = tuple(
        (rank, reader, nbytes)
        for rank, report in sorted(send.reports.items())
        for reader, nbytes in sorted(report.written.items())
    )
    return lambda ticket: Pushed(ticket, name, send.writer, written, token)
