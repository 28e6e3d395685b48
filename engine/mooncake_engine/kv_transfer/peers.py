"""The instances that this one asks, by incarnation. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import zmq.asyncio

from mooncake_engine.errors import LeaseLost
from mooncake_engine.kv_transfer.context import Spawn
from mooncake_engine.kv_transfer.facts import InstanceFacts
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
from mooncake_engine.kv_transfer.rank_messages import ConnectPeer, ForgetPeer
from mooncake_engine.kv_transfer.side_channel import SideChannelClient

logger = logging.getLogger(__name__)


CheckFit = Callable[[InstanceFacts, InstanceFacts], None]
"""Takes our facts and the peer's; raises HandshakeRefused if the two don't fit."""


class Ranks(Protocol):
    """The ranks of this instance, who hear of peers that come and go."""

    def tell_all(self, message: ConnectPeer | ForgetPeer) -> None:
        """Send a message to every rank."""
        ...


class PeerAddress(Protocol):
    """Whom to ask, and where."""

    @property
    def engine_id(self) -> str:
        """The incarnation."""
        ...

    @property
    def host(self) -> str:
        """Of its side channel."""
        ...

    @property
    def port(self) -> int:
        """Of its side channel."""
        ...


class Peer:
    """One incarnation of an instance.

    Args:
        engine_id: which.
        client: asks it; also for what has no method here.
        check_fit: judges its facts.
    """

    def __init__(self, engine_id: str, client: SideChannelClient, check_fit: CheckFit) -> None:
        self.engine_id = engine_id
        self.client = client
        self._check_fit = check_fit
        self._lock = asyncio.Lock()
        self._is_known = False

    async def shake_hands(self, own: InstanceFacts, ranks: Ranks) -> None:
        """Exchange facts, once, and tell the ranks where the peer's KV lies.

        Raises:
            HandshakeRefused: either side found that the two do not fit.
            LeaseLost: somebody else answers at that address now.
            KVTransferError: nobody does.
        """
        async with self._lock:
            if self._is_known:
                return
            welcome = await self.client.ask(
                lambda ticket: Hello(ticket, PROTOCOL_VERSION, own), Welcome
            )
            facts = welcome.facts
            if facts.engine_id != self.engine_id:
                raise LeaseLost(
                    f"instance {self.engine_id} is gone; {facts.engine_id} answers at its address"
                )
            self._check_fit(own, facts)
            ranks.tell_all(ConnectPeer(facts.engine_id, facts.ranks))
            self._is_known = True

    async def renew(self, request_ids: tuple[str, ...], timeout_s: float) -> tuple[str, ...]:
        """Keep leases alive; returns those that are lost."""
        answer = await self.client.ask(
            lambda ticket: Renew(ticket, request_ids), Renewed, tries=1, try_timeout_s=timeout_s
        )
        return answer.lost

    async def done(self, request_id: str, reader: str) -> LeaseStatus:
        """Say that this attempt has read a prompt; returns how its lease ended."""
        answer = await self.client.ask(lambda ticket: Done(ticket, request_id, reader), Status)
        return answer.status

    async def failed(self, request_id: str, reason: str) -> None:
        """Say that a prompt will not be read."""
        await self.client.ask(lambda ticket: Failed(ticket, request_id, reason), Status)

    def close(self) -> None:
        """Disconnect."""
        self.client.close()


class PeerBook:
    """All peers, by incarnation.

    Args:
        context: ZeroMQ context.
        secret: of the deployment.
        ranks: hear of peers that come and go.
        spawn: runs a task on the loop.
        check_fit: judges the peers' facts.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        secret: bytes,
        ranks: Ranks,
        spawn: Spawn,
        check_fit: CheckFit,
    ) -> None:
        self._context = context
        self._secret = secret
        self._ranks = ranks
        self._spawn = spawn
        self._check_fit = check_fit
        self._peers: dict[str, tuple[Peer, str, asyncio.Task[None]]] = {}

    def get(self, remote: PeerAddress) -> Peer:
        """The peer of that name and address.

        Raises:
            KVTransferError: its address can't be one.
        """
        known = self._peers.get(remote.engine_id)
        if known is not None:
            return known[0]
        client = SideChannelClient(self._context, remote.host, remote.port, self._secret)
        peer = Peer(remote.engine_id, client, self._check_fit)
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
        logger.info("forgot instance %s at %s", engine_id, url)

    def close(self) -> None:
        """Drop all peers."""
        for engine_id in list(self._peers):
            self.forget(engine_id)
