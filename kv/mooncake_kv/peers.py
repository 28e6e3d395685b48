"""The instances that this one asks, by epoch. Loop thread only."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Protocol

from mooncake_kv.errors import HandshakeRefused, KVTransferError, LeaseLost
from mooncake_kv.handshake import CompatibilityCheck, IncompatiblePeers, InstanceMetadata
from mooncake_kv.numerics import foreign_rope_order
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

MAX_PEERS = 4096
"""How many are kept; each costs a connection of the side channel, and some of every rank."""

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
            ("number of KV groups", remote.claimed_num_groups, len(self.metadata.geometry.tables)),
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
            order = foreign_rope_order(self._handshake.own.numerics, metadata.numerics)
            self._handshake.ranks.broadcast(ConnectPeer(metadata.engine_id, ranks, order))
            self.metadata = metadata

    async def introduce(self) -> None:
        """Say Hello again, to a peer that has met so many others since that it has forgotten us.

        Raises:
            HandshakeRefused, LeaseLost, KVTransferError: see ``shake_hands``.
        """
        await self._exchange_metadata()

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


_Key = tuple[str, str]
"""Epoch, and the URL of its side channel."""


@dataclass(slots=True)
class _Entry:
    """A peer, and when it was wanted last."""

    peer: PeerInstance
    last_wanted: float


class PeerTable:
    """All peers, by epoch and address: a request that names a wrong address can't touch the
    connections of others.

    A peer that requests are held at, or that is being asked, is kept; of the others the one that
    was wanted longest ago goes for a new one.

    Args:
        secret: of the deployment.
        handshake: with each of them.
        max_peers: how many there may be.
    """

    def __init__(self, secret: bytes, handshake: Handshake, max_peers: int = MAX_PEERS) -> None:
        self._secret = secret
        self._handshake = handshake
        self._max_peers = max_peers
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()  # longest unwanted first
        self._at_url: defaultdict[str, set[str]] = defaultdict(set)
        self._urls_of: defaultdict[str, set[str]] = defaultdict(set)
        self._num_held: Counter[_Key] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def hold(self, remote: PeerAddress) -> None:
        """A request has something there, or on its way there, until ``release``."""
        self._num_held[_key(remote)] += 1

    def release(self, remote: PeerAddress) -> None:
        """It has nothing there any more."""
        key = _key(remote)
        self._num_held[key] -= 1
        if self._num_held[key] <= 0:
            del self._num_held[key]

    def get(self, remote: PeerAddress) -> PeerInstance:
        """The peer of that name and address.

        Raises:
            KVTransferError: its address can't be one, or all peers that there may be are in use.
        """
        key, now = _key(remote), asyncio.get_running_loop().time()
        if key not in self._entries:
            self._make_room()
            client = SideChannelClient(remote.host, remote.port, self._secret)
            peer = PeerInstance(remote.engine_id, client, self._handshake)
            self._entries[key] = _Entry(peer, now)
            self._at_url[key[1]].add(key[0])
            self._urls_of[key[0]].add(key[1])
        self._entries.move_to_end(key)
        entry = self._entries[key]
        entry.last_wanted = now
        return entry.peer

    async def reach(self, remote: RemoteKV) -> PeerInstance:
        """The peer that holds this, or waits for it, once hands are shaken; one that does not
        answer is dropped.

        Raises:
            HandshakeRefused: it does not fit, which it is kept to remember, or is not what the
                request says.
            KVTransferError: it can't be asked.
        """
        peer = self.get(remote)
        try:
            await peer.shake_hands()
        except HandshakeRefused:
            raise
        except KVTransferError as exc:
            self.forget(remote, str(exc))
            raise
        self.forget_predecessors(remote)
        peer.check_claims(remote)
        return peer

    def _make_room(self) -> None:
        if len(self._entries) < self._max_peers:
            return
        for key in list(self._entries):
            if key not in self._num_held and not self._entries[key].peer.client.is_asking:
                self._forget(key, f"more than {self._max_peers} peers are known, it was idle")
                return
            self._entries.move_to_end(key)  # it is wanted
        logger.warning("all %d peers that there may be are in use", self._max_peers)
        raise KVTransferError(f"all {self._max_peers} peers that there may be are in use")

    def forget_predecessors(self, remote: PeerAddress) -> None:
        """Drop the earlier epochs of a peer that has just proved who it is."""
        engine_id, url = _key(remote)
        for other in self._at_url.get(url, set()) - {engine_id}:
            self._forget((other, url), f"{engine_id} answers there now")

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

    def _forget(self, key: _Key, reason: str) -> None:
        if key not in self._entries:
            return
        entry = self._entries.pop(key)
        _drop(self._at_url, key[1], key[0])
        _drop(self._urls_of, key[0], key[1])
        peer = entry.peer
        peer.close(reason)
        if peer.is_known and not self._is_known(peer.engine_id):
            self._handshake.ranks.broadcast(ForgetPeer(peer.engine_id))
        logger.info("forgot instance %s at %s: %s", *key, reason)

    def _is_known(self, engine_id: str) -> bool:
        urls = self._urls_of.get(engine_id, ())
        return any(self._entries[engine_id, url].peer.is_known for url in urls)


def _drop(index: defaultdict[str, set[str]], key: str, value: str) -> None:
    index[key].discard(value)
    if not index[key]:
        del index[key]


def _key(remote: PeerAddress) -> _Key:
    return remote.engine_id, tcp_url(remote.host, remote.port)
