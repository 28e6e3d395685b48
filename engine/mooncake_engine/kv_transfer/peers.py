"""The prefill instances that this one reads from, by incarnation. Loop thread only."""

from __future__ import annotations

import asyncio
import logging

import zmq.asyncio

from mooncake_engine.errors import LeaseLost
from mooncake_engine.kv_transfer.context import Spawn
from mooncake_engine.kv_transfer.facts import InstanceFacts, check_fit
from mooncake_engine.kv_transfer.params import RemoteKV
from mooncake_engine.kv_transfer.protocol import (
    PROTOCOL_VERSION,
    Done,
    Failed,
    Hello,
    LeaseStatus,
    Renew,
    Renewed,
    Status,
    Welcome,
)
from mooncake_engine.kv_transfer.rank_loads import RankLoads
from mooncake_engine.kv_transfer.rank_messages import ConnectPeer, ForgetPeer
from mooncake_engine.kv_transfer.side_channel import SideChannelClient

logger = logging.getLogger(__name__)


class Peer:
    """One incarnation of a prefill instance."""

    def __init__(self, engine_id: str, client: SideChannelClient) -> None:
        self.engine_id = engine_id
        self._client = client
        self._lock = asyncio.Lock()
        self._is_known = False

    async def shake_hands(self, own: InstanceFacts, ranks: RankLoads) -> None:
        """Exchange facts, once, and tell the ranks where to read.

        Raises:
            HandshakeRefused: either side found that the two do not fit.
            LeaseLost: somebody else answers at that address now.
            KVTransferError: nobody does.
        """
        async with self._lock:
            if self._is_known:
                return
            welcome = await self._client.ask(
                lambda ticket: Hello(ticket, PROTOCOL_VERSION, own), Welcome
            )
            facts = welcome.facts
            if facts.engine_id != self.engine_id:
                raise LeaseLost(
                    f"instance {self.engine_id} is gone; {facts.engine_id} answers at its address"
                )
            check_fit(facts, own)
            ranks.tell_all(ConnectPeer(facts.engine_id, facts.ranks))
            self._is_known = True

    async def renew(self, request_ids: tuple[str, ...], timeout_s: float) -> tuple[str, ...]:
        """Keep leases alive; returns those that are lost."""
        answer = await self._client.ask(
            lambda ticket: Renew(ticket, request_ids), Renewed, tries=1, try_timeout_s=timeout_s
        )
        return answer.lost

    async def done(self, request_id: str, reader: str) -> LeaseStatus:
        """Say that this attempt has read a prompt; returns how its lease ended."""
        answer = await self._client.ask(lambda ticket: Done(ticket, request_id, reader), Status)
        return answer.status

    async def failed(self, request_id: str, reason: str) -> None:
        """Say that a prompt will not be read."""
        await self._client.ask(lambda ticket: Failed(ticket, request_id, reason), Status)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


class PeerBook:
    """All peers, by incarnation.

    Args:
        context: ZeroMQ context.
        secret: of the deployment.
        ranks: hears of peers that come and go.
        spawn: runs a task on the loop.
    """

    def __init__(
        self, context: zmq.asyncio.Context, secret: bytes, ranks: RankLoads, spawn: Spawn
    ) -> None:
        self._context = context
        self._secret = secret
        self._ranks = ranks
        self._spawn = spawn
        self._peers: dict[str, tuple[Peer, str, asyncio.Task[None]]] = {}

    def get(self, remote: RemoteKV) -> Peer:
        """The holder of that KV.

        Raises:
            KVTransferError: its address can't be one.
        """
        known = self._peers.get(remote.engine_id)
        if known is not None:
            return known[0]
        client = SideChannelClient(self._context, remote.host, remote.port, self._secret)
        peer = Peer(remote.engine_id, client)
        self._peers[remote.engine_id] = (peer, client.url, self._spawn(client.receive()))
        return peer

    def forget_predecessors(self, engine_id: str) -> None:
        """Drop the earlier incarnations of a peer that has just proved who it is."""
        known = self._peers.get(engine_id)
        if known is None:
            return
        for other, (_, url, _) in list(self._peers.items()):
            if url == known[1] and other != engine_id:
                self.forget(other)

    def forget(self, engine_id: str) -> None:
        """Drop a peer that failed or was replaced; a later request starts afresh. Idempotent."""
        known = self._peers.pop(engine_id, None)
        if known is None:
            return
        peer, url, receiving = known
        receiving.cancel()
        peer.close()
        self._ranks.tell_all(ForgetPeer(engine_id))
        logger.info("forgot prefill instance %s at %s", engine_id, url)

    def close(self) -> None:
        """Drop all peers."""
        for engine_id in list(self._peers):
            self.forget(engine_id)
