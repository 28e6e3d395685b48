"""The prefill half of pushing: ask for entry, keep in touch, say how it ended. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_engine.errors import HandshakeRefused, KVTransferError, LeaseLost
from mooncake_engine.kv_transfer.context import Side, SideContext
from mooncake_engine.kv_transfer.events import LeaseEnded
from mooncake_engine.kv_transfer.params import PushTarget, RemoteKV
from mooncake_engine.kv_transfer.peers import Peer, PeerBook
from mooncake_engine.kv_transfer.protocol import (
    AnyMessage,
    Inquire,
    LeaseStatus,
    Pushed,
    PushedToken,
    PushFailed,
    PushOpen,
    Standing,
    Status,
    Writer,
)
from mooncake_engine.kv_transfer.push.decode_side import LONGEST_PAUSE_S, spread_of
from mooncake_engine.kv_transfer.push.rank_messages import (
    EndPush,
    PushReport,
    StartPush,
    StopPush,
    ToRank,
    encode,
)
from mooncake_engine.kv_transfer.signs_of_life import Interval, SignsOfLife

logger = logging.getLogger(__name__)

RETELL_PAUSE_S = 0.5
"""Between tries to tell how a push ended."""


class RankGroup:
    """All ranks of this instance.

    Args:
        num_ranks: how many there are.
        send: carries a message to a rank's worker side.
    """

    def __init__(self, num_ranks: int, send: Callable[[int, bytes], None]) -> None:
        self.num_ranks = num_ranks
        self._send = send

    def tell_all(self, message: ToRank) -> None:
        """Send a message to every rank."""
        encoded = encode(message)
        for rank in range(self.num_ranks):
            self._send(rank, encoded)


@dataclass(slots=True)
class _Send:
    """One request on its way out.

    Args:
        target: where to.
        writer: how we introduce ourselves.
        first_token: known once the prefill is complete.
        is_open: the peer has let us in.
        has_ended: the scheduler is done with the request.
        is_told: the peer knows how it ended, or can't be told.
    """

    target: PushTarget
    writer: Writer
    last_heard: float
    first_token: PushedToken | None = None
    reports: dict[int, PushReport] = field(default_factory=dict)
    error: str | None = None
    is_open: bool = False
    has_ended: bool = False
    is_told: bool = False

    @property
    def remote(self) -> RemoteKV:
        """Where to."""
        return self.target.remote


@dataclass(slots=True)
class SendCounts:
    """What the prefill side has done so far."""

    pushes: int = 0
    failures: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class PushPrefillSide(Side):
    """Requests on their way out.

    Args:
        context: what both halves work with.
        ranks: the workers of this instance.
        peers: the decode instances.
        address: host and port of our side channel.
    """

    def __init__(
        self, context: SideContext, ranks: RankGroup, peers: PeerBook, address: tuple[str, int]
    ) -> None:
        super().__init__(context)
        self.counts = SendCounts()
        self._ranks = ranks
        self._peers = peers
        self._address = address
        self._sends: dict[str, _Send] = {}
        interval = Interval(context.lease_s, LONGEST_PAUSE_S)
        self._signs = SignsOfLife(interval, self._renew, context.spawn)

    @property
    def num_sending(self) -> int:
        """Requests whose end the peer does not know yet, or that still run."""
        return len(self._sends)

    # --- from the scheduler ------------------------------------------------------------------

    def begin(self, request_id: str, target: PushTarget) -> None:
        """A request has come: ask its decode instance for entry, while it is being computed."""
        self.counts.pushes += 1
        writer = Writer(self._facts.engine_id, request_id, *self._address)
        send = self._sends[request_id] = _Send(target, writer, self._clock())
        self._spawn(self._open(request_id, send))

    def complete(self, end: EndPush, first_token: PushedToken) -> None:
        """The prefill is complete; ``LeaseEnded`` follows when its blocks are free."""
        send = self._sends[end.request_id]
        send.first_token = first_token
        self._end(send, end)

    def withdraw(self, request_id: str) -> None:
        """Send no more of a request; ``LeaseEnded`` follows when its blocks are free."""
        send = self._sends.get(request_id)
        if send is None:
            return  # it is drained and free already
        if send.has_ended:
            self._fail(request_id, send, "the request was aborted")
            return
        send.error = send.error or "the request ended before its prefill was complete"
        self._end(send, EndPush(request_id, is_complete=False))

    def _end(self, send: _Send, end: EndPush) -> None:
        send.has_ended = True
        self._ranks.tell_all(end)
        self._settle(end.request_id, send)

    # --- from the ranks ----------------------------------------------------------------------

    def report(self, rank: int, report: PushReport) -> None:
        """A rank has drained its part; a failure ends the parts of the others."""
        send = self._sends.get(report.request_id)
        if send is None or rank in send.reports:
            return
        send.reports[rank] = report
        if report.error is not None:
            self._fail(report.request_id, send, report.error)
        if self._is_drained(send):
            self._spawn(self._tell(report.request_id, send))
            self._settle(report.request_id, send)

    def _fail(self, request_id: str, send: _Send, reason: str) -> None:
        if send.error is None:
            send.error = reason
            self._ranks.tell_all(StopPush(request_id, reason, send.has_ended))

    def _settle(self, request_id: str, send: _Send) -> None:
        """Free the blocks once all ranks are drained; forget the rest once the peer is told."""
        if send.has_ended and self._is_drained(send):
            self._sink(LeaseEnded(request_id))
            if send.is_told:
                self._sends.pop(request_id, None)

    # --- to the decode instance --------------------------------------------------------------

    async def _open(self, request_id: str, send: _Send) -> None:
        try:
            peer = self._peers.get(send.remote)
            await peer.shake_hands(self._facts, self._ranks)
            self._peers.forget_predecessors(send.remote)
            peer.check_told(send.remote)
            send.last_heard = self._clock()  # if there is an answer: from before it, as in _renew
            status = await self._ask(
                peer, lambda ticket: PushOpen(ticket, send.remote.request_id, send.writer)
            )
            if status is not LeaseStatus.HELD:
                raise LeaseLost(f"the decode instance answers {status.value}: it let nobody in")
            if self._is_overdue(send):
                raise LeaseLost("the decode instance let us in, and took a lease to say so")
        except KVTransferError as exc:
            level = self._refusals.level(send.remote.engine_id)
            logger.log(level, "request %s can't be pushed: %s", request_id, exc)
            self._fail(request_id, send, str(exc))
            return
        if send.error is None:
            send.is_open = True
            self._signs.hasten(send.remote)
            self._ranks.tell_all(_start_order(request_id, send))

    async def _tell(self, request_id: str, send: _Send) -> None:
        """Say how it ended, for as long as somebody may be waiting to hear it, or to ask."""
        make = _ending(send)
        if send.error is not None:
            self.counts.failures += 1
            level = self._refusals.level(send.remote.engine_id)
            logger.log(level, "pushing %s failed: %s", request_id, send.error)
        else:
            self.counts.nbytes += sum(sum(r.written.values()) for r in send.reports.values())
            self.counts.seconds += max(report.seconds for report in send.reports.values())
        give_up = self._clock() + max(self._lease_s, send.remote.lease_s or 0.0)
        while not send.is_told:
            try:
                await self._ask(self._peers.get(send.remote), make)
                send.is_told = True
            except KVTransferError as exc:
                send.is_told = isinstance(exc, HandshakeRefused) or self._clock() > give_up
                if send.is_told:
                    logger.warning("could not tell the end of %s: %s", request_id, exc)
                    self._peers.forget(send.remote, "it could not be told how a push ended")
                else:  # an address that is none fails at once
                    await asyncio.sleep(RETELL_PAUSE_S)
        self._settle(request_id, send)

    def standing(self, message: Inquire) -> Standing:
        """What a decode instance wants to know that has not heard of its pushes for a while."""
        known = [name for name in message.request_ids if name in self._sends]
        ended = [name for name in known if self._is_drained(self._sends[name])]
        endings = (_ending(self._sends[name])(message.ticket) for name in ended)
        running = tuple(name for name in known if name not in ended)
        return Standing(message.ticket, self._facts.engine_id, running, tuple(endings))

    def _is_drained(self, send: _Send) -> bool:
        return len(send.reports) == self._ranks.num_ranks

    async def _ask(self, peer: Peer, make: Callable[[int], AnyMessage]) -> LeaseStatus:
        return (await peer.client.ask(make, Status)).status

    # --- signs of life -----------------------------------------------------------------------

    async def keep_in_touch(self) -> None:
        """Tell every decode instance, in one message each, what is on its way; until cancelled.

        What has ended is no longer spoken of: a peer that has not heard how will ask.
        """
        await self._signs.give(self._under_way)

    def _under_way(self) -> dict[str, _Send]:
        """What the peers have let us in for, and is not drained."""
        return {
            request_id: send
            for request_id, send in self._sends.items()
            if send.is_open and not self._is_drained(send)
        }

    async def _renew(self, group: dict[str, _Send], within_s: float) -> None:
        names = {send.remote.request_id: name for name, send in group.items()}
        asked = self._clock()  # the peer, who counts from our last word, may have heard it then
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
            if not self._is_drained(group[name]):  # it may have ended meanwhile
                self._fail(name, group[name], "the decode instance no longer waits for it")

    def _drop_silent(self, group: dict[str, _Send], reason: str) -> None:
        """Nobody may be there any more: stop writing before somebody else is, and before the peer
        takes us for dead."""
        for request_id, send in group.items():
            if self._is_overdue(send):
                self._fail(request_id, send, reason)

    def _is_overdue(self, send: _Send) -> bool:
        """Whether the peer has been silent for a lease, by either side's measure."""
        lease_s = min(self._lease_s, send.remote.lease_s or self._lease_s)
        return self._clock() - send.last_heard > lease_s

    # --- the end -----------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Stop everything, and wait until no rank writes and the peers know, or so long; whether
        no rank writes."""
        for request_id, send in list(self._sends.items()):
            self._fail(request_id, send, "the prefill instance shuts down")
        give_up = self._clock() + timeout_s
        while self._clock() < give_up:
            if all(send.is_told for send in self._sends.values()):
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
    """From ticket to the message that says how a push ended."""
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
