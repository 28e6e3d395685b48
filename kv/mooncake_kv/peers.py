"""The instances that this one connects to, by epoch: handshakes, requests, and when to drop them.
Loop thread only."""

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
"""Maximum number of peers; each costs a connection of the side channel, and several per rank."""

IDLE_S = 600.0
"""Seconds without a request after which a peer is dropped. Keepalives are sent while KV is held
there or in flight, so an idle peer has neither."""


class PeerAddress(Protocol):
    """The epoch of a peer, and the address of its side channel."""

    @property
    def engine_id(self) -> str:
        """The peer's epoch."""
        ...

    @property
    def host(self) -> str:
        """Host of its side channel."""
        ...

    @property
    def port(self) -> int:
        """Port of its side channel."""
        ...


@dataclass(frozen=True, slots=True)
class Handshake:
    """Everything that a handshake with a peer needs.

    Args:
        own: this instance's metadata.
        ranks: the ranks of this instance, which connect to peers and forget them.
        check: the compatibility check.
        incompatible: records the peers that are refused, or that refuse.
    """

    own: InstanceMetadata
    ranks: RankGroup
    check: CompatibilityCheck
    incompatible: IncompatiblePeers


class PeerInstance:
    """One epoch of a peer instance.

    Args:
        engine_id: name of the epoch.
        client: sends it requests, including those that have no method here.
        handshake: what the handshake needs.

    Attributes:
        metadata: the peer's metadata; None before the handshake.
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
        """Whether the handshake has succeeded."""
        return self.metadata is not None

    def check_claims(self, remote: RemoteKV) -> None:
        """Check that a request's parameters describe this peer as its metadata do.

        Raises:
            HandshakeRefused: they differ; both values are in the message.
        """
        assert self.metadata is not None, "the handshake precedes all requests"
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

    async def handshake(self) -> None:
        """Exchange metadata, once, and send the peer's ranks to ours.

        Raises:
            HandshakeRefused: either side found the two incompatible, now or earlier.
            LeaseLost: another instance answers at that address now.
            KVTransferError: no instance answers.
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

    async def say_hello(self) -> None:
        """Send Hello again, to a peer that has evicted our metadata.

        Raises:
            HandshakeRefused, LeaseLost, KVTransferError: see ``handshake``.
        """
        await self._exchange_metadata()

    async def _exchange_metadata(self) -> tuple[InstanceMetadata, tuple[str, ...]]:
        """Exchange Hello and Welcome; returns the peer's metadata, and the transports that may be
        used between the two."""
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
        """Renew leases; returns those that are lost."""
        answer = await self.client.ask(
            lambda ticket: Renew(ticket, request_ids), Renewed, tries=1, try_timeout_s=timeout_s
        )
        return answer.lost

    async def done(self, request_id: str, reader: str) -> LeaseStatus:
        """Report that this reader has read a prompt; returns how its lease ended."""
        answer = await self.client.ask(lambda ticket: Done(ticket, request_id, reader), LeaseReply)
        return answer.status

    async def failed(self, request_id: str, reason: str) -> None:
        """Report that a prompt will not be read."""
        await self.client.ask(lambda ticket: Failed(ticket, request_id, reason), LeaseReply)

    def close(self, reason: str) -> None:
        """Disconnect; requests in flight fail with the reason."""
        self.client.close(reason)


_Key = tuple[str, str]
"""Epoch, and the URL of its side channel."""


@dataclass(slots=True)
class _Entry:
    """A peer, and when it was last used."""

    peer: PeerInstance
    last_used: float


class PeerTable:
    """All peers, by epoch and address. The address is part of the key, so a request that names a
    wrong one can't affect the connections of others.

    When the table is full, a new peer replaces the least recently used one that holds nothing for
    a request and has no request in flight.

    Args:
        secret: the deployment's secret.
        handshake: what the handshake with each peer needs.
        max_peers: capacity of the table.
    """

    def __init__(self, secret: bytes, handshake: Handshake, max_peers: int = MAX_PEERS) -> None:
        self._secret = secret
        self._handshake = handshake
        self._max_peers = max_peers
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()  # least recently used first
        self._at_url: defaultdict[str, set[str]] = defaultdict(set)
        self._urls_of: defaultdict[str, set[str]] = defaultdict(set)
        self._num_held: Counter[_Key] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def hold(self, remote: PeerAddress) -> None:
        """Keep a peer until ``release``: it holds KV for a request, or KV is in flight to it."""
        self._num_held[_key(remote)] += 1

    def release(self, remote: PeerAddress) -> None:
        """Undo one ``hold``."""
        key = _key(remote)
        self._num_held[key] -= 1
        if self._num_held[key] <= 0:
            del self._num_held[key]

    def get(self, remote: PeerAddress) -> PeerInstance:
        """Return the peer of an epoch and address, adding it if it is new.

        Raises:
            KVTransferError: the address is invalid, or the table is full and all peers are in use.
        """
        key, now = _key(remote), asyncio.get_running_loop().time()
        if key not in self._entries:
            self._evict_idle_peer()
            client = SideChannelClient(remote.host, remote.port, self._secret)
            peer = PeerInstance(remote.engine_id, client, self._handshake)
            self._entries[key] = _Entry(peer, now)
            self._at_url[key[1]].add(key[0])
            self._urls_of[key[0]].add(key[1])
        self._entries.move_to_end(key)
        entry = self._entries[key]
        entry.last_used = now
        return entry.peer

    async def reach(self, remote: RemoteKV) -> PeerInstance:
        """Return the peer that holds or awaits this KV, after the handshake. A peer that does not
        answer is dropped.

        Raises:
            HandshakeRefused: the peer is incompatible, in which case it stays in the table to
                remember that; or it is not what the request's parameters claim.
            KVTransferError: the peer can't be reached.
        """
        peer = self.get(remote)
        try:
            await peer.handshake()
        except HandshakeRefused:
            raise
        except KVTransferError as exc:
            self.forget(remote, str(exc), failed=peer)
            raise
        self.forget_predecessors(remote)
        peer.check_claims(remote)
        return peer

    def _evict_idle_peer(self) -> None:
        if len(self._entries) < self._max_peers:
            return
        for key in list(self._entries):
            if (
                key not in self._num_held
                and not self._entries[key].peer.client.has_requests_in_flight
            ):
                self._forget(key, f"it was idle, and more than {self._max_peers} peers are known")
                return
            self._entries.move_to_end(key)  # in use
        logger.warning("no new peer can be added: all %d are in use", self._max_peers)
        raise KVTransferError(f"no new peer can be added: all {self._max_peers} are in use")

    def forget_predecessors(self, remote: PeerAddress) -> None:
        """Drop earlier epochs at the address of a peer whose handshake has succeeded."""
        engine_id, url = _key(remote)
        for other in self._at_url.get(url, set()) - {engine_id}:
            self._forget((other, url), f"{engine_id} answers there now")

    def forget(
        self, remote: PeerAddress, reason: str, *, failed: PeerInstance | None = None
    ) -> None:
        """Drop a peer; a later request starts with a new handshake. Idempotent.

        All requests in flight to the peer fail, so it is not for a request that merely got no
        answer.

        Args:
            remote: the epoch and the address.
            reason: why it is dropped.
            failed: the peer that failed; another one that has taken its place is kept. None drops
                any.
        """
        key = _key(remote)
        entry = self._entries.get(key)
        if entry is not None and failed in (None, entry.peer):
            self._forget(key, reason)

    async def sweep(self) -> None:
        """Drop idle peers periodically, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_S / 10)
            self.forget_idle(asyncio.get_running_loop().time())

    def forget_idle(self, now: float) -> None:
        """Drop peers that have been idle for IDLE_S. Where instances come and go at changing
        addresses, nothing else detects that a peer left while it was idle."""
        for key, entry in list(self._entries.items()):
            if now - entry.last_used > IDLE_S:
                self._forget(key, f"it was idle for {IDLE_S:g} s")

    def close(self) -> None:
        """Drop all peers."""
        for key in list(self._entries):
            self._forget(key, "this instance is shutting down")

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
