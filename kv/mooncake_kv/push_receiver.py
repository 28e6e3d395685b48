"""Decode side of push: reserves blocks, asks for a prefill, checks that every byte arrived. Loop
thread only."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable

from mooncake_hal.errors import PlanError
from mooncake_hal.session.listener import DEAD_HOST_SECONDS
from mooncake_kv.connector import LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext, TransferCounts
from mooncake_kv.errors import (
    HandshakeRefused,
    KVTransferError,
    PeerAbsent,
    PeerGone,
    PeerUnreachable,
)
from mooncake_kv.handshake import InstanceMetadata, check_prefill_peer
from mooncake_kv.leases import Reservation, ReservationState, ReservationTable
from mooncake_kv.liveness import MAX_PUSH_INTERVAL_S, KeepaliveInterval
from mooncake_kv.metaserver_client import RequestMetaserver
from mooncake_kv.numerics import foreign_rope_order
from mooncake_kv.params import FirstToken, KVTransferDict
from mooncake_kv.protocol import (
    AnyMessage,
    Hello,
    LeaseReply,
    LeaseStatus,
    Pushed,
    PushFailed,
    PushOpen,
    Reject,
    Renew,
    Renewed,
    StatusReply,
    Welcome,
    Writer,
    welcome,
)
from mooncake_kv.push_progress import expected_bytes
from mooncake_kv.ranks import ConvertRopeOrder, spread_of

logger = logging.getLogger(__name__)

MAX_WRITERS = 1024
"""Prefill instances whose metadata is kept. The one that has sent neither Hello nor PushOpen for
longest is evicted, and has to send Hello again."""

MISSED_KEEPALIVES = 3
"""Missed keepalives after which the writer is asked for its status."""

UNREACHABLE_LEASES = 10
UNREACHABLE_S = 2.0 * DEAD_HOST_SECONDS
"""A writer is considered dead when its host has sent no packet for this many leases, and for at
least this many seconds. A live writer that can't reach us stops by itself within a lease and a
transfer. If its host was suspended for all that time and resumes, our kernel has already closed its
connections, because the kernel's own keepalives got no answer."""

Granted = tuple[Reservation, Writer]
"""A reservation, and the writer that it was granted to."""

StatusInquiry = Callable[[Writer, list[str], bool], Awaitable[StatusReply]]
"""Asks a writer's instance for the status of pushes. Takes the writer, its own names of the
requests, and whether it is on this host. Raises as ``StatusInquiry.ask``."""

RopeConversion = Callable[[ConvertRopeOrder], Awaitable[object]]
"""Converts rope rows on all ranks; returns when it is done. Raises KVTransferError."""

PostParams = Callable[[RequestMetaserver, KVTransferDict], Awaitable[None]]
"""Asks the metaserver for a prefill; raises as ``post_params``."""


class PushReceiver:
    """The reservations of this instance, and the handler of writers' messages about them.

    Args:
        context: services of the connector.
        inquire: asks a silent writer for its status.
        post: asks the metaserver for a prefill.
        convert_rope: has all ranks convert the rope rows of received KV into our order.
        max_load_s: timeout of a request's load, its prefill included, in seconds; applies even if
            the writer is alive.
    """

    def __init__(
        self,
        context: ConnectorContext,
        inquire: StatusInquiry,
        post: PostParams,
        convert_rope: RopeConversion,
        *,
        max_load_s: float,
    ) -> None:
        self._context = context
        self.counts = TransferCounts()
        self._transfer_s = context.drain_s
        self._drain_s = 0.0 if context.stops_writes_on_failure else context.drain_s
        self._unreachable_s = max(
            UNREACHABLE_LEASES * context.lease_s,
            context.lease_s + context.drain_s,
            UNREACHABLE_S,
        )
        self._inquire = inquire
        self._post = post
        self._convert_rope = convert_rope
        self._max_load_s = max_load_s
        self._pause_s = KeepaliveInterval(context.lease_s, MAX_PUSH_INTERVAL_S).of(())
        self._table = ReservationTable(context.lease_s, MISSED_KEEPALIVES * self._pause_s)
        self._writers: OrderedDict[str, InstanceMetadata] = OrderedDict()
        self._started: dict[str, float] = {}  # loads that have not ended
        self._cancelled: set[str] = set()  # those whose request has ended: nobody lacks their KV
        self._blocks: dict[str, tuple[int, ...]] = {}  # of requests whose load has not ended
        self._draining: dict[str, tuple[float, str]] = {}  # when to free, and the failure's reason

    @property
    def num_reserved(self) -> int:
        """Number of requests whose blocks a writer may still change."""
        return len(self._table) + len(self._draining)

    def load(
        self,
        request_id: str,
        block_ids: tuple[int, ...],
        metaserver: RequestMetaserver,
        params: KVTransferDict,
    ) -> None:
        """Reserve blocks and ask for a prefill that writes them. ``LoadEnded`` follows; the last
        one is drained.

        Args:
            request_id: the request to load.
            block_ids: its block table.
            metaserver: where to ask for the prefill.
            params: see ``build_reservation_params``.
        """
        self.counts.transfers += 1
        self._blocks[request_id] = block_ids
        tokens = params["remote_cached_tokens"], params["num_prompt_tokens"]
        self._started[request_id] = self._context.clock()
        digest = params.get("prompt_digest", "")
        self._table.reserve(request_id, tokens, self._context.clock(), digest)
        self._context.spawn(self._ask(request_id, metaserver, params), request_id)

    def cancel(self, request_id: str) -> None:
        """Cancel a request that has ended. Idempotent; an unknown request is ignored."""
        if request_id in self._started:
            self._cancelled.add(request_id)
        if self._table.revoke(request_id, self._context.clock()):
            self._finish(request_id, "the request ended before a prefill instance opened its push")

    def abort(self, request_id: str, reason: str) -> None:
        """Fail a request, even an unknown one. If a writer was granted its blocks, they stay
        reserved until that writer has stopped."""
        held = self._table.get(request_id)
        if held is None or self._table.revoke(request_id, self._context.clock()):
            self._finish(request_id, reason)
        else:
            self._fail_reserved(request_id, reason, "its writer reports that it has stopped")

    async def _ask(
        self, request_id: str, metaserver: RequestMetaserver, params: KVTransferDict
    ) -> None:
        try:
            await self._post(metaserver, params)
        except KVTransferError as exc:
            held = self._table.get(request_id)
            # if it was granted, a writer came nevertheless
            if held is not None and held.state is ReservationState.OFFERED:
                self._table.end(request_id, None, LeaseStatus.EXPIRED)
                self._finish(request_id, str(exc))

    def handle(self, message: AnyMessage) -> AnyMessage:
        """Answer a prefill instance.

        Raises:
            HandshakeRefused: the instance is incompatible, or has to send Hello first.
        """
        ticket = message.ticket
        if isinstance(message, Hello):
            return self._welcome(message)
        if isinstance(message, Renew):
            return Renewed(ticket, self._table.renew(message.request_ids, self._context.clock()))
        if isinstance(message, PushOpen):
            return LeaseReply(ticket, self._open(message))
        if isinstance(message, Pushed):
            return LeaseReply(ticket, self._pushed(message))
        if isinstance(message, PushFailed):
            return LeaseReply(ticket, self._failed(message))
        return Reject(ticket, f"{type(message).__name__} is not a request to a decode instance")

    def _welcome(self, hello: Hello) -> Welcome:
        own, incompatible = self._context.instance, self._context.incompatible
        check = self._context.rounding.noting(check_prefill_peer)
        reply = welcome(hello, own, check, incompatible)
        self._writers[hello.instance.engine_id] = hello.instance
        self._writers.move_to_end(hello.instance.engine_id)
        if len(self._writers) > MAX_WRITERS:
            self._writers.popitem(last=False)
        return reply

    def _open(self, message: PushOpen) -> LeaseStatus:
        if message.writer.engine_id not in self._writers:
            raise HandshakeRefused(
                f"send Hello before PushOpen: instance {message.writer.engine_id} is not known here"
            )
        self._writers.move_to_end(message.writer.engine_id)
        held = self._table.get(message.request_id)
        if held is not None and held.prompt_digest != message.prompt_digest:
            # Its KV would be used for this prompt, and cached for all prompts with this prefix.
            logger.warning(
                "instance %s was given another prompt than request %s has: its push is refused",
                message.writer.engine_id,
                message.request_id,
            )
            return LeaseStatus.EXPIRED
        return self._table.open(message.request_id, message.writer, self._context.clock())

    def _pushed(self, message: Pushed) -> LeaseStatus:
        request_id = message.request_id
        held = self._table.get(request_id)
        if held is None or held.writer != message.writer:
            return self._table.ending(request_id, message.writer)
        mismatch = self._find_mismatch(held, message)
        is_complete = mismatch is None and held.state is ReservationState.GRANTED
        ending = LeaseStatus.RELEASED if is_complete else LeaseStatus.EXPIRED
        self._table.end(request_id, message.writer, ending)
        if is_complete:
            nbytes = sum(nbytes for _, _, nbytes in message.written)
            self.counts.nbytes += nbytes
            self._context.received.add(message.writer.engine_id, nbytes)
            self._complete(held, message)
        else:
            self._finish(request_id, mismatch or "the request ended before its KV was complete")
        return ending

    def _complete(self, held: Reservation, message: Pushed) -> None:
        """Complete a load all of whose KV has arrived; rope rows in another order than ours are
        converted first."""
        request_id, writer = message.request_id, self._writers[message.writer.engine_id]
        order = foreign_rope_order(self._context.instance.numerics, writer.numerics)
        if order:
            conversion = ConvertRopeOrder(request_id, self._blocks[request_id], *held.tokens, order)
            self._context.spawn(
                self._convert_and_finish(conversion, message.first_token), request_id
            )
        else:
            self._finish(request_id, None, message.first_token)

    async def _convert_and_finish(self, order: ConvertRopeOrder, first: FirstToken | None) -> None:
        """Convert rope rows, then complete the load. The writer has stopped, and the request keeps
        waiting even if it was cancelled, so the blocks stay ours meanwhile."""
        try:
            await self._convert_rope(order)
        except KVTransferError as exc:
            self._finish(order.request_id, str(exc))
        else:
            self._finish(order.request_id, None, first)

    def _failed(self, message: PushFailed) -> LeaseStatus:
        request_id = message.request_id
        if self._table.end(request_id, message.writer, LeaseStatus.EXPIRED):
            reason = f"the prefill instance gave up: {message.reason}"
            drain_s = self._drain_s if message.may_still_arrive else 0.0
            peer = message.writer.engine_id
            is_refused = peer in self._context.incompatible
            self.counts.refused += is_refused and request_id not in self._cancelled
            self._release_when_drained(
                request_id, reason, drain_s, self._context.incompatible.level(peer)
            )
        return self._table.ending(request_id, message.writer)

    def _find_mismatch(self, held: Reservation, message: Pushed) -> str | None:
        """Compare the bytes that each rank wrote to each of ours with what was expected. Returns
        the difference as a message; None if all counts are exact."""
        # Every byte has exactly one elected writer, and both sides compute which one. So the exact
        # count per pair of ranks reveals a missing layer, chunk or rank, and also bytes that were
        # written twice or by a rank that was not elected. A total would hide these.
        written = {(writer, reader): nbytes for writer, reader, nbytes in message.written}
        metadata = self._writers.get(message.writer.engine_id)
        if metadata is None:
            return f"instance {message.writer.engine_id} is not known here any more"
        try:
            expected = expected_bytes(
                self._context.instance.geometry,
                [rank.shard for rank in metadata.ranks],
                [rank.shard for rank in self._context.instance.ranks],
                held.tokens,
                spread_of(held.request_id),
                self._context.instance.block_size,
            )
        except PlanError as exc:
            return str(exc)
        if written == expected:
            return None
        return (
            f"bytes by (prefill rank, decode rank) should be {expected}, "
            f"the prefill instance wrote {written}"
        )

    async def sweep(self) -> None:
        """Check all deadlines periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            self.reap()

    def reap(self) -> None:
        """Time out reservations without a writer, and ask silent writers for their status."""
        silent: defaultdict[tuple[str, str, int], list[Granted]] = defaultdict(list)
        for held in self._table.overdue(self._context.clock()):
            writer = held.writer
            if writer is None:
                self._table.end(held.request_id, None, LeaseStatus.EXPIRED)
                reason = f"no prefill instance opened its push within {self._context.lease_s:g} s"
                self._finish(held.request_id, reason)
            else:
                silent[writer.engine_id, writer.host, writer.port].append((held, writer))
        for group in silent.values():
            self._context.spawn(self._ask_for_status(group))
        self._time_out_overlong()
        self._free_drained()

    def _time_out_overlong(self) -> None:
        """Time out requests whose writer is alive but makes no progress."""
        now = self._context.clock()
        for request_id, started in list(self._started.items()):
            if now - started <= self._max_load_s:
                continue
            reason = f"its KV was not complete within {self._max_load_s:g} s"
            if self._table.revoke(request_id, now):
                self._finish(request_id, reason)
            else:
                self._fail_reserved(request_id, reason, "its writer answers or is dead")

    def _free_drained(self) -> None:
        """Free the blocks whose writer failed or died long enough ago that no write of it can still
        arrive."""
        now = self._context.clock()
        for request_id, (free_at, reason) in list(self._draining.items()):
            if free_at <= now:
                del self._draining[request_id]
                self._context.post(LoadEnded(request_id, reason))

    async def _ask_for_status(self, group: list[Granted]) -> None:
        """Ask one silent instance for the status of its pushes; if it is dead, release their
        blocks."""
        try:
            first_writer = group[0][1]
            names = [writer.request_id for _, writer in group]
            reply = await self._inquire(first_writer, names, self._is_local(first_writer))
        except PeerGone as exc:
            for held, writer in group:
                self._mark_dead(held, writer, str(exc), self._drain_s_of(writer))
        except PeerAbsent as exc:
            for held, writer in group:  # if alive, it gets no answer and stops within a lease
                self._mark_dead(held, writer, str(exc), self._context.lease_s + self._transfer_s)
        except KVTransferError as exc:
            logger.info("the status of %d pushes is unknown: %s", len(group), exc)
            for held, writer in group:
                self._on_unknown_status(held, writer, exc)
        else:
            self._process_status(group, reply)

    def _process_status(self, group: list[Granted], reply: StatusReply) -> None:
        """Process the status reply of a writer that had been silent."""
        for ending in reply.endings:
            self.handle(ending)
        for held, writer in group:
            if writer.request_id in reply.running:
                self._table.renew([held.request_id], self._context.clock())
            else:
                reason = f"prefill instance {writer.engine_id} has no record of it any more"
                self._mark_dead(held, writer, reason, self._drain_s)

    def _mark_dead(self, held: Reservation, writer: Writer, reason: str, drain_s: float) -> None:
        """Release the blocks of a writer that died without a report, unless its report arrived
        meanwhile."""
        if self._table.get(held.request_id) is held:
            self._table.end(held.request_id, writer, LeaseStatus.EXPIRED)
            self._release_when_drained(held.request_id, reason, drain_s)

    def _on_unknown_status(self, held: Reservation, writer: Writer, exc: KVTransferError) -> None:
        """Keep the blocks of a writer whose status is unknown, because it may still be writing;
        release them if its host has been unreachable for too long."""
        now = self._context.clock()
        if not isinstance(exc, PeerUnreachable):
            held.last_reachable = now
        silent_s = now - held.last_reachable
        if silent_s > self._unreachable_s:
            self._mark_dead(held, writer, f"{exc}, for {silent_s:.0f} s", 0.0)
        else:
            self._time_out(held, writer)

    def _drain_s_of(self, writer: Writer) -> float:
        """How long writes of a dead instance may still arrive, in seconds. Ranks in processes of
        their own end soon after the instance's process, not before it."""
        metadata = self._writers.get(writer.engine_id)
        has_processes = metadata is None or len(metadata.ranks) > 1
        return self._transfer_s if has_processes else self._drain_s

    def _is_local(self, writer: Writer) -> bool:
        """Whether the writer's side channel is known to be on this host."""
        metadata = self._writers.get(writer.engine_id)
        return metadata is not None and metadata.host == self._context.instance.host != ""

    def _time_out(self, held: Reservation, writer: Writer) -> None:
        """Fail a request whose writer has been silent for a lease. Its blocks stay reserved."""
        now = self._context.clock()
        if (
            self._table.get(held.request_id) is not held
            or held.state is not ReservationState.GRANTED
        ):
            return
        if now - held.last_contact > self._context.lease_s:
            self._table.revoke(held.request_id, now)
            reason = f"prefill instance {writer.engine_id} has been silent for longer than a lease"
            limit = f"its writer answers, is dead, or unreachable for {self._unreachable_s:g} s"
            self._fail_reserved(held.request_id, reason, limit)

    def _release_when_drained(
        self, request_id: str, reason: str, drain_s: float, level: int = logging.WARNING
    ) -> None:
        """Fail a request; its blocks are freed once no write can arrive there any more."""
        if drain_s:
            self._draining[request_id] = self._context.clock() + drain_s, reason
            limit = f"no write can arrive any more, {drain_s:g} s from now"
            self._fail_reserved(request_id, reason, limit)
        else:
            self._finish(request_id, reason, level=level)

    def _fail_reserved(self, request_id: str, reason: str, until: str) -> None:
        level = logging.INFO if request_id in self._cancelled else logging.WARNING
        logger.log(level, "request %s: %s; its blocks are kept until %s", request_id, reason, until)
        self._count_end(request_id, is_failure=True)
        self._context.post(LoadEnded(request_id, reason, is_drained=False))

    def _finish(
        self,
        request_id: str,
        error: str | None,
        first: FirstToken | None = None,
        *,
        level: int = logging.WARNING,
    ) -> None:
        if error is not None:
            level = logging.INFO if request_id in self._cancelled else level
            logger.log(level, "the KV of %s was not received: %s", request_id, error)
        self._count_end(request_id, is_failure=error is not None)
        self._context.post(LoadEnded(request_id, error, first))

    def _count_end(self, request_id: str, *, is_failure: bool) -> None:
        """Count the end of a load, once."""
        self._blocks.pop(request_id, None)
        started = self._started.pop(request_id, None)
        if started is not None:
            self.counts.failures += is_failure and request_id not in self._cancelled
            self._cancelled.discard(request_id)
            self.counts.seconds += self._context.clock() - started
