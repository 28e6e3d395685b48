"""The decode half of pushing: reserve, ask for a prefill, judge what came. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from zlib import crc32

from mooncake_engine.errors import HandshakeRefused, KVTransferError, PeerAbsent, PeerGone
from mooncake_engine.kv_transfer.context import Side, SideContext
from mooncake_engine.kv_transfer.events import LoadEnded
from mooncake_engine.kv_transfer.facts import InstanceFacts
from mooncake_engine.kv_transfer.protocol import (
    AnyMessage,
    Hello,
    LeaseStatus,
    Pushed,
    PushedToken,
    PushFailed,
    PushOpen,
    Reject,
    Renew,
    Renewed,
    Standing,
    Status,
    Welcome,
    Writer,
)
from mooncake_engine.kv_transfer.push.metaserver import post_params
from mooncake_engine.kv_transfer.push.plan import expected_bytes
from mooncake_engine.kv_transfer.push.reservations import Reservation, ReservationTable, Stage
from mooncake_engine.kv_transfer.signs_of_life import Interval
from mooncake_engine.messages import KVTransferParams, TokenLogprobs
from mooncake_engine.scheduling.request import FirstToken
from mooncake_hal.errors import PlanError

logger = logging.getLogger(__name__)

REMEMBERED_WRITERS = 1024
MAX_LOAD_S = 300.0
"""However alive its writer is, no request waits longer for its KV."""

LONGEST_PAUSE_S = 1.0
"""Between a writer's signs of life, however long the leases are."""

SILENT_PAUSES = 3
"""After so many missed signs of life a writer is looked for."""

Granted = tuple[Reservation, Writer]
"""A reservation, and who was let in."""

Inquirer = Callable[[Writer, list[str], bool], Awaitable[Standing]]
"""Asks a writer's instance about pushes, by its own names, and told whether it is on this host;
raises as ``presence.inquire``."""

Post = Callable[[str, KVTransferParams], Awaitable[None]]
"""Asks for a prefill, at that address; raises as ``metaserver.post_params``."""


@dataclass(slots=True)
class ReceiveCounts:
    """What the decode side has done so far."""

    loads: int = 0
    failures: int = 0
    refusals: int = 0
    nbytes: int = 0
    seconds: float = 0.0


def spread_of(request_id: str) -> int:
    """Which replicas write a request: the same number on both sides.

    Args:
        request_id: the decode instance's.
    """
    return crc32(request_id.encode())


class PushDecodeSide(Side):
    """Reservations, and what writers may say about them.

    Args:
        context: what both halves work with.
        inquire: how to look for a writer of whom nothing is heard.
        post: how to ask for a prefill.
    """

    def __init__(self, context: SideContext, inquire: Inquirer, post: Post = post_params) -> None:
        super().__init__(context)
        self.counts = ReceiveCounts()
        self._transfer_s = context.landing_s
        self._landing_s = 0.0 if context.can_revoke else context.landing_s
        self._inquire = inquire
        self._post = post
        self._pause_s = Interval(context.lease_s, LONGEST_PAUSE_S).of(())
        self._table = ReservationTable(context.lease_s, SILENT_PAUSES * self._pause_s)
        self._writers: OrderedDict[str, InstanceFacts] = OrderedDict()
        self._started: dict[str, float] = {}
        self._landing: dict[str, tuple[float, str]] = {}  # free from when on, and why it failed

    @property
    def num_reserved(self) -> int:
        """Requests whose blocks a writer may still change."""
        return len(self._table) + len(self._landing)

    # --- from the scheduler ------------------------------------------------------------------

    def load(self, request_id: str, metaserver: str, params: KVTransferParams) -> None:
        """Reserve blocks and ask for their KV; ``LoadEnded`` follows, drained at last."""
        self.counts.loads += 1
        num_tokens = params["num_prompt_tokens"] - params["remote_cached_tokens"]
        self._started[request_id] = self._clock()
        self._table.reserve(request_id, num_tokens, self._clock())
        self._spawn(self._ask(request_id, metaserver, params))

    def cancel(self, request_id: str) -> None:
        """Give up on a request. Idempotent; unknown ones are normal."""
        if self._table.revoke(request_id, self._clock()):
            self._finish(request_id, "the request ended before a prefill instance came")

    async def _ask(self, request_id: str, metaserver: str, params: KVTransferParams) -> None:
        try:
            await self._post(metaserver, params)
        except KVTransferError as exc:
            held = self._table.get(request_id)
            if held is not None and held.stage is Stage.OFFERED:  # else somebody came nevertheless
                self._table.end(request_id, None, LeaseStatus.EXPIRED)
                self._finish(request_id, str(exc))

    # --- from the writers --------------------------------------------------------------------

    def handle(self, message: AnyMessage) -> AnyMessage:
        """Answer a prefill instance.

        Raises:
            HandshakeRefused: one that does not fit.
        """
        ticket = message.ticket
        if isinstance(message, Hello):
            return self._welcome(message)
        if isinstance(message, Renew):
            return Renewed(ticket, self._table.renew(message.request_ids, self._clock()))
        if isinstance(message, PushOpen):
            return Status(ticket, self._open(message))
        if isinstance(message, Pushed):
            return Status(ticket, self._pushed(message))
        if isinstance(message, PushFailed):
            return Status(ticket, self._failed(message))
        return Reject(ticket, f"{type(message).__name__} is not for an instance that is pushed to")

    def _welcome(self, hello: Hello) -> Welcome:
        self._check_hello(hello, prefill=hello.facts, decode=self._facts)
        self._writers[hello.facts.engine_id] = hello.facts
        if len(self._writers) > REMEMBERED_WRITERS:
            self._writers.popitem(last=False)
        return Welcome(hello.ticket, self._facts)

    def _open(self, message: PushOpen) -> LeaseStatus:
        if message.writer.engine_id not in self._writers:
            raise HandshakeRefused("say Hello before PushOpen: this instance does not know you")
        return self._table.open(message.request_id, message.writer, self._clock())

    def _pushed(self, message: Pushed) -> LeaseStatus:
        name = message.request_id
        held = self._table.get(name)
        if held is None or held.writer != message.writer:
            return self._table.ending(name, message.writer)
        gap = self._find_gap(held, message)
        is_taken = gap is None and held.stage is Stage.GRANTED
        ending = LeaseStatus.RELEASED if is_taken else LeaseStatus.EXPIRED
        self._table.end(name, message.writer, ending)
        if is_taken:
            self.counts.nbytes += sum(nbytes for _, _, nbytes in message.written)
            self._finish(name, None, _first_token(message.first_token))
        else:
            self._finish(name, gap or "the request ended before its KV was complete")
        return ending

    def _failed(self, message: PushFailed) -> LeaseStatus:
        name = message.request_id
        if self._table.end(name, message.writer, LeaseStatus.EXPIRED):
            reason = f"the prefill instance gave up: {message.reason}"
            landing_s = self._landing_s if message.may_land else 0.0
            peer = message.writer.engine_id
            self.counts.refusals += peer in self._refusals
            self._vacate(name, reason, landing_s, self._refusals.level(peer))
        return self._table.ending(name, message.writer)

    def _find_gap(self, held: Reservation, message: Pushed) -> str | None:
        """What is missing or too much, byte for byte and rank for rank; None if it is exact."""
        told = {(writer, reader): nbytes for writer, reader, nbytes in message.written}
        facts = self._writers.get(message.writer.engine_id)
        if facts is None:
            return f"instance {message.writer.engine_id} has not said hello for too long"
        try:
            expected = expected_bytes(
                self._facts.geometry,
                [rank.shard for rank in facts.ranks],
                [rank.shard for rank in self._facts.ranks],
                held.num_tokens,
                spread_of(held.request_id),
            )
        except PlanError as exc:
            return str(exc)
        if told == expected:
            return None
        return (
            f"bytes by (prefill rank, decode rank) should be {expected}, "
            f"the prefill instance wrote {told}"
        )

    # --- silence -----------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Look at all deadlines, again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            self.look_around()

    def look_around(self) -> None:
        """Give up what nobody came for, and look for writers of whom nothing is heard."""
        silent: defaultdict[tuple[str, str, int], list[Granted]] = defaultdict(list)
        for held in self._table.overdue(self._clock()):
            writer = held.writer
            if writer is None:
                self._table.end(held.request_id, None, LeaseStatus.EXPIRED)
                reason = f"no prefill instance came within {self._lease_s:g} s"
                self._finish(held.request_id, reason)
            else:
                silent[writer.engine_id, writer.host, writer.port].append((held, writer))
        for group in silent.values():
            self._spawn(self._look_for(group))
        self._give_up_overlong()
        self._free_landed()

    def _give_up_overlong(self) -> None:
        """A writer that lives and does not get on is not waited for, either."""
        now = self._clock()
        for request_id, started in list(self._started.items()):
            if now - started <= MAX_LOAD_S:
                continue
            reason = f"its KV was not complete within {MAX_LOAD_S:g} s"
            if self._table.revoke(request_id, now):
                self._finish(request_id, reason)
            else:
                self._give_up(request_id, reason, "that instance answers or is dead")

    def _free_landed(self) -> None:
        """What had been sent when its writer failed or died has arrived by now, or never will."""
        now = self._clock()
        for request_id, (free_at, reason) in list(self._landing.items()):
            if free_at <= now:
                del self._landing[request_id]
                self._sink(LoadEnded(request_id, reason))

    async def _look_for(self, group: list[Granted]) -> None:
        """Ask one instance for what it should have said; a dead one frees its blocks."""
        try:
            asked = group[0][1]
            names = [writer.request_id for _, writer in group]
            standing = await self._inquire(asked, names, self._is_near(asked))
        except PeerGone as exc:
            for held, writer in group:
                self._bury(held, writer, str(exc), self._lingering_s(writer))
        except PeerAbsent as exc:
            for held, writer in group:  # unheard, it stops within a lease, if it is not dead
                self._bury(held, writer, str(exc), self._lease_s + self._transfer_s)
        except KVTransferError as exc:
            logger.info("nothing is known of %d pushes: %s", len(group), exc)
            for held, writer in group:
                self._lose_patience(held, writer)
        else:
            self._take_in(group, standing)

    def _take_in(self, group: list[Granted], standing: Standing) -> None:
        """A writer that has not been heard of for a while has said how its pushes stand."""
        for ending in standing.endings:
            self.handle(ending)
        for held, writer in group:
            if writer.request_id in standing.running:
                self._table.renew([held.request_id], self._clock())
            else:
                reason = f"prefill instance {writer.engine_id} knows nothing of it any more"
                self._bury(held, writer, reason, self._landing_s)

    def _bury(self, held: Reservation, writer: Writer, reason: str, landing_s: float) -> None:
        """A writer has ended without a word; unless it said one meanwhile."""
        if self._table.get(held.request_id) is held:
            self._table.end(held.request_id, writer, LeaseStatus.EXPIRED)
            self._vacate(held.request_id, reason, landing_s)

    def _lingering_s(self, writer: Writer) -> float:
        """How long something of a dead instance may arrive: ranks that are processes of their own
        end with it, but not before it."""
        facts = self._writers.get(writer.engine_id)
        has_processes = facts is None or len(facts.ranks) > 1
        return self._transfer_s if has_processes else self._landing_s

    def _is_near(self, writer: Writer) -> bool:
        """Whether its side channel is on this host, as far as that is known."""
        facts = self._writers.get(writer.engine_id)
        return facts is not None and facts.host == self._facts.host != ""

    def _lose_patience(self, held: Reservation, writer: Writer) -> None:
        """Of a writer that is silent for too long the request is freed, not the blocks."""
        now = self._clock()
        if self._table.get(held.request_id) is not held or held.stage is not Stage.GRANTED:
            return
        if now - held.last_heard > self._lease_s:
            self._table.revoke(held.request_id, now)
            reason = f"nothing heard of prefill instance {writer.engine_id} for too long"
            self._give_up(held.request_id, reason, "that instance answers or is dead")

    # --- endings -----------------------------------------------------------------------------

    def _vacate(
        self, request_id: str, reason: str, landing_s: float, level: int = logging.WARNING
    ) -> None:
        """The request is freed; its blocks too, once nothing can arrive there any more."""
        if landing_s:
            self._landing[request_id] = self._clock() + landing_s, reason
            limit = f"nothing can arrive there any more, {landing_s:g} s from now"
            self._give_up(request_id, reason, limit)
        else:
            self._finish(request_id, reason, level=level)

    def _give_up(self, request_id: str, reason: str, until: str) -> None:
        logger.warning("request %s: %s; its blocks are kept until %s", request_id, reason, until)
        self._account(request_id, is_failure=True)
        self._sink(LoadEnded(request_id, reason, is_drained=False))

    def _finish(
        self,
        request_id: str,
        error: str | None,
        first: FirstToken | None = None,
        *,
        level: int = logging.WARNING,
    ) -> None:
        if error is not None:
            logger.log(level, "the KV of %s did not come: %s", request_id, error)
        self._account(request_id, is_failure=error is not None)
        self._sink(LoadEnded(request_id, error, first))

    def _account(self, request_id: str, *, is_failure: bool) -> None:
        """Count a load's end, once."""
        started = self._started.pop(request_id, None)
        if started is not None:
            self.counts.failures += is_failure
            self.counts.seconds += self._clock() - started


def _first_token(token: PushedToken) -> FirstToken:
    logprobs = None
    if token.logprobs is not None:
        logprob, top = token.logprobs
        logprobs = TokenLogprobs(token.token_id, logprob, top)
    return FirstToken(token.token_id, logprobs, token.num_cached_tokens)
