"""The decode half of pulling: keep leases while requests queue, then load. Loop thread only."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mooncake_kv.connector import LoadEnded
from mooncake_kv.connector_scheduler import ConnectorContext, TransferCounts
from mooncake_kv.errors import HandshakeRefused, KVTransferError, LeaseLost
from mooncake_kv.liveness import KEEPALIVES_PER_LEASE, Keepalive, KeepaliveInterval
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import IDLE_S, PeerInstance, PeerTable
from mooncake_kv.protocol import LeaseStatus
from mooncake_kv.ranks import Load, RankLoads, spread_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Expected:
    """A request whose KV a peer holds; ``may_be_written`` while its blocks are the ranks'."""

    remote: RemoteKV
    last_renewed: float
    is_loading: bool = False
    is_cancelled: bool = False
    may_be_written: bool = False


class PullReceiver:
    """Expected requests and running loads.

    Args:
        context: what it works with.
        loads: on the ranks of this instance.
        peers: the prefill instances.
    """

    def __init__(self, context: ConnectorContext, loads: RankLoads, peers: PeerTable) -> None:
        self._context = context
        self.counts = TransferCounts()
        self._loads = loads
        self._peers = peers
        self._expected: dict[str, _Expected] = {}
        # a peer that is not asked anything for IDLE_S is dropped, however long its leases are
        interval = KeepaliveInterval(context.lease_s, IDLE_S / KEEPALIVES_PER_LEASE)
        self._keepalive = Keepalive(interval, self._renew, context.spawn, context.has_stalled)

    def expect(self, request_id: str, remote: RemoteKV) -> None:
        """Keep this lease alive until the request is loaded or cancelled."""
        self._expected[request_id] = _Expected(remote, self._context.clock())
        self._peers.hold(remote)
        self._keepalive.hasten(remote)

    def load(self, request_id: str, local_blocks: tuple[int, ...], start: int) -> None:
        """Load an expected request's prompt from token ``start`` on; ``LoadEnded`` follows."""
        expected = self._expected.get(request_id)
        if expected is None:  # its lease was lost just before; that LoadEnded is on its way
            return
        remote = expected.remote
        order = Load(
            request_id,
            remote.engine_id,
            local_blocks,
            remote.block_ids,
            start,
            remote.num_tokens,
            spread=spread_of(remote.request_id),
        )
        expected.is_loading = True
        self._context.spawn(self._run(order, expected), request_id)

    def cancel(self, request_id: str) -> None:
        """Give up on a request: tell its peer, and end its load if one runs. Idempotent."""
        expected = self._expected.get(request_id)
        if expected is None:
            return
        if expected.is_loading:
            expected.is_cancelled = True
            self._loads.cancel(request_id)
            return
        self._forget(request_id)
        self._spawn_failed(expected.remote, "the request ended before its KV was read")

    def give_up(self, request_id: str, reason: str) -> None:
        """End a request's wait, whatever is known of it; a running load reports its own end."""
        expected = self._expected.get(request_id)
        if expected is None or not expected.is_loading:
            self._forget(request_id)
            self._context.post(LoadEnded(request_id, reason))

    def _forget(self, request_id: str) -> None:
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._peers.release(expected.remote)

    async def keep_leases(self) -> None:
        """Renew, in one message per peer, what is expected; until cancelled."""
        await self._keepalive.give(lambda: self._expected)

    async def _renew(self, group: dict[str, _Expected], within_s: float) -> None:
        """One peer's leases: what it has lost, or all of them if it has long been silent."""
        names = {expected.remote.request_id: name for name, expected in group.items()}
        try:
            peer = self._peers.get(next(iter(group.values())).remote)
            lost = await peer.renew(tuple(names), within_s)
        except KVTransferError as exc:
            self._drop_silent(group, str(exc))
            return
        now = self._context.clock()
        for expected in group.values():
            expected.last_renewed = now
        for remote_id in lost:
            self._lose(names[remote_id], "the prefill instance no longer holds its KV")

    def _drop_silent(self, group: dict[str, _Expected], reason: str) -> None:
        for request_id, expected in group.items():
            if self._context.clock() - expected.last_renewed > self._context.lease_s:
                self._lose(request_id, reason)
                self._peers.forget(expected.remote, reason)

    def _lose(self, request_id: str, reason: str) -> None:
        """A running load finds out by itself; a queued request ends here."""
        expected = self._expected.get(request_id)
        if expected is not None and not expected.is_loading:
            self._forget(request_id)
            self.counts.failures += 1
            logger.warning("the KV of %s is lost: %s", request_id, reason)
            self._context.post(LoadEnded(request_id, reason))

    async def _run(self, order: Load, expected: _Expected) -> None:
        """One load from first to last; whatever happens, its end is reported once, drained."""
        error: str | None = "the load was interrupted"
        self.counts.transfers += 1
        try:
            await self._load(order, expected)
            error = None
        except KVTransferError as exc:  # once the ranks have orders, from all of their reports
            expected.may_be_written = False
            error = str(exc)
            self._note_failure(order, error)
            self._spawn_failed(expected.remote, error)
        except Exception as exc:
            error = f"the load failed: {exc!r}"
            self.counts.failures += 1
            raise  # to be logged
        finally:
            self._forget(order.request_id)
            is_drained = not expected.may_be_written
            self._context.post(LoadEnded(order.request_id, error, is_drained=is_drained))

    def _note_failure(self, order: Load, error: str) -> None:
        self.counts.failures += 1
        self.counts.refused += order.engine_id in self._context.incompatible
        level = self._context.incompatible.level(order.engine_id)
        logger.log(level, "loading the KV of %s failed: %s", order.request_id, error)

    async def _load(self, order: Load, expected: _Expected) -> None:
        remote = expected.remote
        reader = f"{self._context.instance.engine_id}/{order.request_id}"
        if order.start >= order.stop:  # all of it is here: the holder's fate does not matter
            self._context.spawn(
                self._tell(remote, lambda peer: peer.done(remote.request_id, reader))
            )
            return
        peer = self._peers.get(remote)
        await self._shake_hands(peer, remote)
        if expected.is_cancelled:
            raise KVTransferError("cancelled before it began")
        started = self._context.clock()
        expected.may_be_written = True
        reports = await self._loads.run(order)
        expected.may_be_written = False
        self.counts.nbytes += sum(report.nbytes for report in reports)
        self.counts.seconds += self._context.clock() - started
        # Validation after the read: the holder can't stop a one-sided read, under which its lease
        # may have run out, so that its blocks are another request's by now. Only a lease that was
        # held until after the last byte proves that what was read is this prompt's KV. The reader's
        # name makes a repeated Done idempotent, and a second reader's void.
        status = await peer.done(remote.request_id, reader)
        if status is not LeaseStatus.RELEASED:
            raise LeaseLost(
                f"the prefill instance's lease was {status.value} when the read ended; "
                "what was read is not used"
            )

    async def _shake_hands(self, peer: PeerInstance, remote: RemoteKV) -> None:
        try:
            await peer.shake_hands()
        except HandshakeRefused:
            raise  # the peer is kept, because it remembers that
        except KVTransferError as exc:
            self._peers.forget(remote, str(exc))
            raise
        self._peers.forget_predecessors(remote)
        peer.check_claims(remote)

    def _spawn_failed(self, remote: RemoteKV, reason: str) -> None:
        self._context.spawn(self._tell(remote, lambda peer: peer.failed(remote.request_id, reason)))

    async def _tell(
        self, remote: RemoteKV, say: Callable[[PeerInstance], Awaitable[object]]
    ) -> None:
        """Send something that needs no reply; a holder that it does not reach has its deadline."""
        try:
            await say(self._peers.get(remote))
        except KVTransferError as exc:
            logger.info("could not tell the holder of %s: %s", remote.request_id, exc)
            self._peers.forget(remote, str(exc))
