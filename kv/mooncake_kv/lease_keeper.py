"""The reader's side of leases: renews the leases at instances that hold KV for this one, and sends
them notifications that need no answer. Loop thread only."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mooncake_kv.connector_scheduler import ConnectorContext
from mooncake_kv.errors import KVTransferError
from mooncake_kv.liveness import KEEPALIVES_PER_LEASE, Keepalive, KeepaliveInterval
from mooncake_kv.params import RemoteKV
from mooncake_kv.peers import IDLE_S, PeerInstance, PeerTable

logger = logging.getLogger(__name__)

OnLost = Callable[[str, str], None]
"""Called with a request whose lease is lost, and the reason; possibly more than once."""


@dataclass(slots=True)
class _KeptLease:
    remote: RemoteKV
    last_renewed: float
    on_lost: OnLost


class LeaseKeeper:
    """Renews leases, with one message per peer for all leases there.

    Args:
        context: services of the connector.
        peers: the instances that hold KV.
    """

    def __init__(self, context: ConnectorContext, peers: PeerTable) -> None:
        self._context = context
        self._peers = peers
        self._kept: dict[str, _KeptLease] = {}
        # PeerTable drops a peer that is not asked anything for IDLE_S, however long its leases are.
        interval = KeepaliveInterval(context.lease_s, IDLE_S / KEEPALIVES_PER_LEASE)
        self._keepalive = Keepalive(interval, self._renew, context.spawn, context.has_stalled)

    def keep(self, request_id: str, remote: RemoteKV, on_lost: OnLost) -> None:
        """Renew a request's lease until ``drop``."""
        self.drop(request_id)
        self._kept[request_id] = _KeptLease(remote, self._context.clock(), on_lost)
        self._peers.hold(remote)
        self._keepalive.wake_for(remote)

    def drop(self, request_id: str) -> None:
        """Stop renewing a request's lease. Idempotent."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._peers.release(kept.remote)

    async def keep_leases(self) -> None:
        """Renew all leases periodically, until cancelled."""
        await self._keepalive.run(lambda: self._kept)

    def spawn_failed(self, remote: RemoteKV, reason: str) -> None:
        """Notify a holder that its KV will not be read."""
        self._context.spawn(
            self._notify(remote, lambda peer: peer.failed(remote.request_id, reason))
        )

    def spawn_done(self, remote: RemoteKV, reader: str) -> None:
        """Notify a holder that its KV is not needed any more."""
        self._context.spawn(self._notify(remote, lambda peer: peer.done(remote.request_id, reader)))

    async def _notify(
        self, remote: RemoteKV, send: Callable[[PeerInstance], Awaitable[object]]
    ) -> None:
        """Notify a holder, if it can be reached; otherwise its lease times out. The peer is kept
        in any case: other requests read from it, and forgetting it would fail them."""
        try:
            await send(self._peers.get(remote))
        except KVTransferError as exc:
            logger.info("could not tell the holder of %s: %s", remote.request_id, exc)

    async def _renew(self, group: dict[str, _KeptLease], within_s: float) -> None:
        """Renew one peer's leases. Fails those that the peer has lost, or all of them if it has
        been silent for a lease."""
        names = {kept.remote.request_id: name for name, kept in group.items()}
        peer: PeerInstance | None = None
        try:
            peer = self._peers.get(next(iter(group.values())).remote)
            lost = await peer.renew(tuple(names), within_s)
        except KVTransferError as exc:
            self._drop_silent(group, peer, str(exc))
            return
        now = self._context.clock()
        for kept in group.values():
            kept.last_renewed = now
        for remote_id in lost:
            name = names[remote_id]
            self._report_lost(name, group[name], "the prefill instance no longer holds its KV")

    def _drop_silent(
        self, group: dict[str, _KeptLease], peer: PeerInstance | None, reason: str
    ) -> None:
        for request_id, kept in group.items():
            if self._context.clock() - kept.last_renewed > self._context.lease_s:
                self._report_lost(request_id, kept, reason)
                if peer is not None:
                    self._peers.forget(kept.remote, reason, failed=peer)

    def _report_lost(self, request_id: str, kept: _KeptLease, reason: str) -> None:
        """Report a lost lease, unless it was dropped or replaced meanwhile."""
        if self._kept.get(request_id) is kept:
            kept.on_lost(request_id, reason)
