"""The instances that this one asks, by epoch. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from mooncake_kv.errors import HandshakeRefused, LeaseLost
from mooncake_kv.handshake import CompatibilityCheck, IncompatiblePeers, InstanceMetadata
from mooncake_kv.params import RemoteKV
from mooncake_kv.protocol import (
    PROTOCOL_VERSION,
    Done,
    Failed,
    Hello,
    LeaseReply,
    LeaseStatus,
    Renew,
    Renewed,
    Welcome,
)
from mooncake_kv.ranks import ConnectPeer, ForgetPeer, RankGroup
from mooncake_kv.side_channel import SideChannelClient, tcp_url

logger = logging.getLogger(__name__)

IDLE_S = 600.0
"""How long a peer is kept that is not asked anything. Keepalives are sent while anything is held
there or on its way, so that there is nothing then."""


class PeerAddress(Protocol):
    """Whom to ask, and where."""

    @property
    def engine_id(self) -> str:
        """The epoch."""
        ...

    @property
    def host(self) -> str:
        """Of its side channel."""
        ...

    @property
    def port(self) -> int:
        """Of its side channel."""
        ...


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a handshake with a peer that this instance asks takes.

    Args:
        own: this instance's metadata.
        ranks: of this instance, which connect to peers and forget them.
        check: judges a peer's metadata.
        incompatible: takes those that are refused, or refuse.
    """

    own: InstanceMetadata
    ranks: RankGroup
    check: CompatibilityCheck
    incompatible: IncompatiblePeers


class PeerInstance:
    """One epoch of an instance.

    Args:
        engine_id: which.
        client: asks it; also for what has no method here.
        handshake: how to introduce ourselves, and judge it.

    Attributes:
        metadata: what it says of itself; None before the handshake.
    """

    def __init__(self, engine_id: str, client: SideChannelClient, handshake: Handshake) -> None:
        self.engine_id = engine_id
        self.client = client
        self._handshake = handshake
        self._refusal: str | None = None
        self._lock = asyncio.Lock()
        self.metadata: InstanceMetadata | None = None

    @property
    def is_known(self) -> bool:
        """Whether hands were shaken."""
        return self.metadata is not None

    def check_claims(self, remote: RemoteKV) -> None:
        """Whether a request's parameters say of this peer what it says of itself.

        Raises:
            HandshakeRefused: they differ; both values are in the message.
        """
        assert self.metadata is not None, "hands are shaken before a request is looked at"
        for name, claimed, found in (
            ("tensor-parallel size", remote.claimed_tp_size, self.metadata.tp_size),
            ("block size", remote.claimed_block_size, self.metadata.block_size),
        ):
            if claimed is not None and claimed != found:
                raise HandshakeRefused(
                    f"the request's parameters give instance {self.engine_id} a {name} of "
                    f"{claimed}, it has {found}; pass on the parameters as the instance wrote them"
                )

    async def shake_hands(self) -> None:
        """Exchange metadata, once, and tell the ranks where the peer's KV lies.

        Raises:
            HandshakeRefused: either side found that the two do not fit, now or earlier.
            LeaseLost: another instance answers at that address now.
            KVTransferError: none does.
        """
        async with self._lock:
            if self.is_known:
                return
            if self._refusal is not None:
                raise HandshakeRefused(self._refusal)
            try:
                metadata, transports = await self._exchange_metadata()
            except HandshakeRefused as exc:
                self._refusal = str(exc)
                self._handshake.incompatible.note(self.engine_id, self._refusal)
                raise
            ranks = metadata.reachable_by(transports)
            self._handshake.ranks.broadcast(ConnectPeer(metadata.engine_id, ranks))
            self.metadata = metadata

    async def _exchange_metadata(self) -> tuple[InstanceMetadata, tuple[str, ...]]:
        """The peer's metadata, and the transports that may be used to it."""
        own = self._handshake.own
        welcome = await self.client.ask(
            lambda ticket: Hello(ticket, PROTOCOL_VERSION, own), Welcome
        )
        metadata = welcome.instance
        if metadata.engine_id != self.engine_id:
            raise LeaseLost(
                f"instance {self.engine_id} is gone; {metadata.engine_id} answers at its address"
            )
        return metadata, self._handshake.check(own, metadata)

    async def renew(self, request_ids: tuple[str, ...], timeout_s: float) -> tuple[str, ...]:
        """Keep leases alive; returns those that are lost."""
        answer = await self.client.ask(
            lambda ticket: Renew(ticket, request_ids), Renewed, tries=1, try_timeout_s=timeout_s
        )
        return answer.lost

    async def done(self, request_id: str, reader: str) -> LeaseStatus:
        """Say that this attempt has read a prompt; returns how its lease ended."""
        answer = await self.client.ask(lambda ticket: Done(ticket, request_id, reader), LeaseReply)
        return answer.status

    async def failed(self, request_id: str, reason: str) -> None:
        """Say that a prompt will not be read."""
        await self.client.ask(lambda ticket: Failed(ticket, request_id, reason), LeaseReply)

    def close(self, reason: str) -> None:
        """Disconnect; pending requests fail with the reason."""
        self.client.close(reason)


@dataclass(slots=True)
class _Entry:
    """A peer, and when it was wanted last."""

    peer: PeerInstance
    last_wanted: float


class PeerTable:
    """All peers, by epoch and address: a request that names a wrong address can't touch the
    connections of others.

    Args:
        secret: of the deployment.
        handshake: with each of them.
    """

    def __init__(self, secret: bytes, handshake: Handshake) -> None:
        self._secret = secret
        self._handshake = handshake
        self._entries: dict[tuple[str, str], _Entry] = {}

    def get(self, remote: PeerAddress) -> PeerInstance:
        """The peer of that name and address.

        Raises:
            KVTransferError: its address can't be one.
        """
        key, now = _key(remote), asyncio.get_running_loop().time()
        if key not in self._entries:
            client = SideChannelClient(remote.host, remote.port, self._secret)
            peer = PeerInstance(remote.engine_id, client, self._handshake)
            self._entries[key] = _Entry(peer, now)
        entry = self._entries[key]
        entry.last_wanted = now
        return entry.peer

    def forget_predecessors(self, remote: PeerAddress) -> None:
        """Drop the earlier epochs of a peer that has just proved who it is."""
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
        """Drop peers that are not asked any more: where instances come and go at ever new
        addresses, nothing else tells of those that went while they had nothing for us."""
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
        peer.close(reason)
        if peer.is_known and not self._is_known(peer.engine_id):
            self._handshake.ranks.broadcast(ForgetPeer(peer.engine_id))
        logger.info("forgot instance %s at %s: %s", *key, reason)

    def _is_known(self, engine_id: str) -> bool:
        peers = (entry.peer for entry in self._entries.values())
        return any(peer.is_known for peer in peers if peer.engine_id == engine_id)


def _key(remote: PeerAddress) -> tuple[str, str]:
    return remote.engine_id, tcp_url(remote.host, remote.port)
