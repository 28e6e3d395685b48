"""The instances that this one asks, by incarnation. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq.asyncio

from mooncake_engine.errors import HandshakeRefused, LeaseLost
from mooncake_engine.kv_transfer.context import Spawn
from mooncake_engine.kv_transfer.facts import InstanceFacts
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
from mooncake_engine.kv_transfer.rank_messages import ConnectPeer, ForgetPeer
from mooncake_engine.kv_transfer.refusals import Refusals
from mooncake_engine.kv_transfer.side_channel import SideChannelClient, tcp_url

logger = logging.getLogger(__name__)

IDLE_S = 600.0
"""How long a peer is kept that nobody asks: signs of life are given while anything is held there
or on its way, so that there is nothing then."""

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
        check_fit: judges its facts; ``facts`` are None until hands were shaken.
        refusals: hear of it if it does not fit.
    """

    def __init__(
        self,
        engine_id: str,
        client: SideChannelClient,
        check_fit: CheckFit,
        refusals: Refusals,
    ) -> None:
        self.engine_id = engine_id
        self.client = client
        self._check_fit = check_fit
        self._refusals = refusals
        self._refusal: str | None = None
        self._lock = asyncio.Lock()
        self.facts: InstanceFacts | None = None

    @property
    def is_known(self) -> bool:
        """Whether hands were shaken."""
        return self.facts is not None

    def check_told(self, remote: RemoteKV) -> None:
        """Whether a request's parameters say of this peer what it says of itself.

        Raises:
            HandshakeRefused: they differ; both values are in the message.
        """
        assert self.facts is not None, "hands are shaken before a request is looked at"
        for name, told, found in (
            ("tensor-parallel size", remote.told_tp_size, self.facts.tp_size),
            ("block size", remote.told_block_size, self.facts.block_size),
        ):
            if told is not None and told != found:
                raise HandshakeRefused(
                    f"the request's parameters give instance {self.engine_id} a {name} of {told}, "
                    f"it has {found}; pass on the parameters as the instance wrote them"
                )

    async def shake_hands(self, own: InstanceFacts, ranks: Ranks) -> None:
        """Exchange facts, once, and tell the ranks where the peer's KV lies.

        Raises:
            HandshakeRefused: either side found that the two do not fit, now or earlier.
            LeaseLost: somebody else answers at that address now.
            KVTransferError: nobody does.
        """
        async with self._lock:
            if self.is_known:
                return
            if self._refusal is not None:
                raise HandshakeRefused(self._refusal)
            try:
                facts = await self._exchange_facts(own)
            except HandshakeRefused as exc:
                self._refusal = str(exc)
                self._refusals.note(self.engine_id, self._refusal)
                raise
            ranks.tell_all(ConnectPeer(facts.engine_id, facts.ranks))
            self.facts = facts

    async def _exchange_facts(self, own: InstanceFacts) -> InstanceFacts:
        welcome = await self.client.ask(
            lambda ticket: Hello(ticket, PROTOCOL_VERSION, own), Welcome
        )
        facts = welcome.facts
        if facts.engine_id != self.engine_id:
            raise LeaseLost(
                f"instance {self.engine_id} is gone; {facts.engine_id} answers at its address"
            )
        self._check_fit(own, facts)
        return facts

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

    def close(self, reason: str) -> None:
        """Disconnect; those who wait for an answer are told why there will be none."""
        self.client.close(reason)


@dataclass(slots=True)
class _Entry:
    """A peer, who listens for its answers, and when it was wanted last."""

    peer: Peer
    receiving: asyncio.Task[None]
    last_wanted: float


class PeerBook:
    """All peers, by incarnation and address: a request that names a wrong address can't touch the
    connections of others.

    Args:
        context: ZeroMQ context.
        secret: of the deployment.
        ranks: hear of peers that come and go.
        spawn: runs a task on the loop.
        check_fit: judges the peers' facts.
        refusals: hear of those that don't fit.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        secret: bytes,
        ranks: Ranks,
        spawn: Spawn,
        check_fit: CheckFit,
        refusals: Refusals,
    ) -> None:
        self._context = context
        self._secret = secret
        self._ranks = ranks
        self._spawn = spawn
        self._check_fit = check_fit
        self._refusals = refusals
        self._entries: dict[tuple[str, str], _Entry] = {}

    def get(self, remote: PeerAddress) -> Peer:
        """The peer of that name and address.

        Raises:
            KVTransferError: its address can't be one.
        """
        key, now = _key(remote), asyncio.get_running_loop().time()
        if key not in self._entries:
            client = SideChannelClient(self._context, remote.host, remote.port, self._secret)
            peer = Peer(remote.engine_id, client, self._check_fit, self._refusals)
            self._entries[key] = _Entry(peer, self._spawn(client.receive()), now)
        entry = self._entries[key]
        entry.last_wanted = now
        return entry.peer

    def forget_predecessors(self, remote: PeerAddress) -> None:
        """Drop the earlier incarnations of a peer that has just proved who it is."""
        engine_id, url = _key(remote)
        for other in list(self._entries):
            if other[1] == url and other[0] != engine_id:
                self._forget(other, f"{engine_id} answers there now")

    def forget(self, remote: PeerAddress, reason: str) -> None:
        """Drop a peer that failed; a later request starts afresh. Idempotent."""
        self._forget(_key(remote), reason)

    async def sweep(self) -> None:
        """Drop idle peers, again and again, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_S / 10)
            self.forget_idle(asyncio.get_running_loop().time())

    def forget_idle(self, now: float) -> None:
        """Drop peers that nobody asks any more: where instances come and go at ever new addresses,
        nothing else tells of those that went while they had nothing for us."""
        for key, entry in list(self._entries.items()):
            if now - entry.last_wanted > IDLE_S:
                self._forget(key, f"it was not needed for {IDLE_S:g} s")

    def close(self) -> None:
        """Drop all peers."""
        for key in list(self._entries):
            self._forget(key, "this instance ends")

    def _forget(self, key: tuple[str, str], reason: str) -> None:
        if key not in self._entries:
            return
        entry = self._entries.pop(key)
        peer = entry.peer
        entry.receiving.cancel()
        peer.close(reason)
        if peer.is_known and not self._is_known(peer.engine_id):
            self._ranks.tell_all(ForgetPeer(peer.engine_id))
        logger.info("forgot instance %s at %s: %s", *key, reason)

    def _is_known(self, engine_id: str) -> bool:
        peers = (entry.peer for entry in self._entries.values())
        return any(peer.is_known for peer in peers if peer.engine_id == engine_id)


def _key(remote: PeerAddress) -> tuple[str, str]:
    return remote.engine_id, tcp_url(remote.host, remote.port)
