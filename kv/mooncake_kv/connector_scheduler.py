"""Base class of a connector's scheduler side: waits for the ranks, binds the side channel, serves
peers, shuts down. ``MooncakeConnector`` and ``MooncakeLayerwiseConnector`` derive from it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake_hal.kv.geometry import AttentionKind
from mooncake_hal.session.addressing import host_identity
from mooncake_hal.session.authentication import secret_digests
from mooncake_hal.specs import TransportConstraints
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector import (
    CompatibilityReport,
    ConnectorFailed,
    HasStalled,
    PostEvent,
    RankEndpointInfo,
    Topology,
    never_stalls,
)
from mooncake_kv.errors import KVConfigError, KVTransferError
from mooncake_kv.handshake import CompatibilityCheck, IncompatiblePeers, InstanceMetadata
from mooncake_kv.io_loop import IoLoop, Spawn, raise_descriptor_limit
from mooncake_kv.numerics import RoundingDifferences
from mooncake_kv.params import (
    InstanceAddress,
    KVTransferParams,
    PushTarget,
    RemoteKV,
    TransferMode,
)
from mooncake_kv.peers import Handshake, PeerTable
from mooncake_kv.protocol import (
    AnyMessage,
    Failed,
    LeaseReply,
    PrefillProgress,
    PushFailed,
    Writer,
)
from mooncake_kv.ranks import (
    REPORT_TIMEOUT_S,
    LoadReport,
    PushReport,
    RankGroup,
    RankLoads,
    RankReady,
    SendToRank,
    decode_from_rank,
)
from mooncake_kv.side_channel import SideChannelServer

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0

CLOSING_ITERATIONS = 4
"""Iterations of the event loop at shutdown, in which closed connections run their callbacks."""


MAX_SENDERS = 256
"""Peers whose received bytes are counted separately; the least recent sender is evicted."""


class BytesByPeer:
    """Bytes of KV received per peer, for the most recent senders. Written on the loop's thread,
    read on any."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def add(self, engine_id: str, nbytes: int) -> None:
        """Count bytes received from an epoch."""
        self._bytes[engine_id] = self._bytes.pop(engine_id, 0) + nbytes
        if len(self._bytes) > MAX_SENDERS:
            del self._bytes[next(iter(self._bytes))]

    def snapshot(self) -> dict[str, int]:
        """Bytes by epoch, since this instance started."""
        return self._bytes.copy()


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """The services that a connector's senders and receivers share.

    Args:
        instance: this instance's metadata.
        lease_s: how long KV is held without a message from its reader, in seconds.
        post: receives events.
        spawn: runs a task on the connector's loop, on behalf of a request or of none.
        clock: monotonic, in seconds.
        stops_writes_on_failure: whether every transport of this instance has
            ``Transport.stops_writes_on_failure``.
        drain_s: how long a write may outlast its writer where it does not end with it, in seconds.
        incompatible: peers whose handshake was refused, by either end.
        rounding: peers whose KV is rounded differently.
        has_stalled: returns whether the engine has stopped stepping.
        received: bytes of KV received, by peer.
    """

    instance: InstanceMetadata
    lease_s: float
    post: PostEvent
    spawn: Spawn
    clock: Callable[[], float] = time.monotonic
    stops_writes_on_failure: bool = True
    drain_s: float = 0.0
    incompatible: IncompatiblePeers = field(default_factory=IncompatiblePeers)
    rounding: RoundingDifferences = field(default_factory=RoundingDifferences)
    has_stalled: HasStalled = never_stalls
    received: BytesByPeer = field(default_factory=BytesByPeer)


@dataclass(slots=True)
class TransferCounts:
    """Counters of a sender or a receiver. ``refused`` is the part of ``failures`` whose peer can't
    exchange KV with this instance."""

    transfers: int = 0
    failures: int = 0
    refused: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class ConnectorScheduler(ABC):
    """The life cycle of a connector's scheduler side. Subclasses provide a sender and a receiver.

    Args:
        config: addresses, secret, timeouts.
        num_ranks: number of ranks of this instance.
        check_compatible: the compatibility check for peers that this instance connects to.
    """

    mode: TransferMode
    pulls_early = False  # see ``Topology``

    def __init__(
        self, config: KVTransferConfig, num_ranks: int, check_compatible: CompatibilityCheck
    ) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._check_compatible = check_compatible
        self._incompatible = IncompatiblePeers()
        self._rounding = RoundingDifferences()
        self._received = BytesByPeer()
        self._readiness: dict[int, RankReady] = {}
        self._ranks_ready = threading.Event()
        self._is_started = False

    @abstractmethod
    def _open_flows(self, context: ConnectorContext) -> list[Coroutine[Any, Any, None]]:
        """Build the sender and the receiver; returns their background tasks, which run until the
        connector closes. Loop thread."""

    @abstractmethod
    def _handle(self, message: AnyMessage) -> AnyMessage:
        """Reply to a peer, without blocking. Any exception other than HandshakeRefused ends the
        peer's session. Loop thread."""

    @abstractmethod
    def _on_rank_report(self, rank: int, report: LoadReport | PushReport) -> None:
        """Process the report of a rank that has drained a load or a push. Loop thread."""

    @abstractmethod
    def _fail_request(self, request_id: str, reason: str) -> None:
        """Fail a request after an unexpected exception. Its KV is not transferred, and its blocks
        are released once no transfer can change them. Loop thread."""

    @abstractmethod
    async def _drain(self) -> bool:
        """Stop the transfers that must not outlive the side channel. Returns False if one of them
        could not be stopped. Loop thread."""

    def on_rank_message(self, rank: int, message: bytes) -> None:
        decoded = decode_from_rank(message)
        if isinstance(decoded, RankReady):
            self._readiness[rank] = decoded
            if len(self._readiness) == self._num_ranks:
                self._ranks_ready.set()
        else:
            self._loop.call(decoded.request_id, self._on_rank_report, rank, decoded)

    def start(
        self,
        instance: InstanceMetadata,
        *,
        send: SendToRank,
        post: PostEvent,
        has_stalled: HasStalled = never_stalls,
    ) -> None:
        if not self._ranks_ready.wait(START_TIMEOUT_S):
            raise KVConfigError(
                f"only {len(self._readiness)} of {self._num_ranks} ranks opened their "
                f"transports within {START_TIMEOUT_S:g} s"
            )
        ready = [self._readiness[rank] for rank in range(self._num_ranks)]
        self._instance = msgspec.structs.replace(
            instance,
            ranks=tuple(rank.metadata for rank in ready),
            host=_host(),
            transports=_common_transports(ready),
            converts_rope_order=instance.geometry.kind is AttentionKind.MLA,
        )
        self._secret_digests = secret_digests(self._config.secret.encode())
        self._ranks = RankGroup(self._num_ranks, send)
        raise_descriptor_limit()
        self._loop = IoLoop(
            "kv-connector",
            lambda request_id, exc: self._fail_request(
                request_id, f"the connector failed: {exc!r}"
            ),
            lambda dead: post(ConnectorFailed(dead)),
        )
        stops_writes_on_failure = all(rank.stops_writes_on_failure for rank in ready)
        context = ConnectorContext(
            self._instance,
            self._config.lease_s,
            post,
            self._loop.spawn,
            stops_writes_on_failure=stops_writes_on_failure,
            drain_s=self._config.transfer_timeout_s,
            incompatible=self._incompatible,
            rounding=self._rounding,
            has_stalled=has_stalled,
            received=self._received,
        )
        try:
            self._loop.run(self._open(context), START_TIMEOUT_S)
        except BaseException:
            self._loop.close()
            raise
        self._is_started = True

    def close(self) -> None:
        if not self._is_started:
            return
        self._is_started = False
        if self._loop.is_alive:  # else its failure has been reported
            self._loop.run(self._shut_down(), START_TIMEOUT_S + self._config.transfer_timeout_s)
        self._loop.close()

    def _refuses(self, request_id: str, params: KVTransferParams) -> bool:
        """Whether a request names a peer, but is for the other transfer mode. Then the peer is
        notified: the holder of KV that it is not read, or the instance that has reserved blocks
        that their KV will not come."""
        target = params.target
        remote = params.remote if target is None else target.remote
        if remote is None or params.mode is self.mode:
            return False
        self._loop.call(request_id, self._refuse, request_id, remote, target, params.mode)
        return True

    def _refuse(
        self, request_id: str, remote: RemoteKV, target: PushTarget | None, mode: TransferMode
    ) -> None:
        remote_id, address = remote.request_id, self._address
        writer = Writer(address.engine_id, request_id, address.host, address.port)
        lease_s = self._config.lease_s
        reason = (
            f"it was asked for KV transfer by {mode.value}, but its connector does "
            f"{self.mode.value}"
        )

        def make(ticket: int) -> AnyMessage:
            if target is None:
                return Failed(ticket, remote_id, reason)
            if mode is TransferMode.PUSH:
                return PushFailed(ticket, remote_id, writer, reason)
            digest = target.prompt_digest
            return PrefillProgress(
                ticket, remote_id, writer, 0, (), 0, digest, lease_s, None, reason
            )

        self._loop.spawn(self._notify(request_id, remote, make), request_id)

    async def _notify(
        self, request_id: str, remote: RemoteKV, make: Callable[[int], AnyMessage]
    ) -> None:
        self._peers.hold(remote)
        try:
            await self._peers.get(remote).client.ask(make, LeaseReply)
        except KVTransferError as exc:
            logger.warning("the peer of %s could not be notified: %s", request_id, exc)
        finally:
            self._peers.release(remote)

    def compatibility(self) -> CompatibilityReport:
        return CompatibilityReport(
            self._instance.engine_id, self._incompatible.engine_ids, self._received.snapshot()
        )

    def topology(self) -> Topology:
        instance, address = self._instance, self._address
        return Topology(
            engine_id=instance.engine_id,
            host=address.host,
            port=address.port,
            tp_size=instance.tp_size,
            pp_size=instance.pp_size,
            block_size=instance.block_size,
            backend=instance.hardware.backend,
            generation=instance.hardware.generation,
            ranks=tuple(RankEndpointInfo(rank.endpoints) for rank in instance.ranks),
            transports=instance.transports,
            must_match=instance.must_match,
            pulls_early=self.pulls_early,
            rounding=instance.numerics.rounding,
            secret_digests=self._secret_digests,
        )

    async def _open(self, context: ConnectorContext) -> None:
        config = self._config
        secret = config.secret.encode()
        server = await SideChannelServer.listen(config.host, _ports(config), secret, self._handle)
        self._server = server
        check = self._rounding.noting(self._check_compatible)
        handshake = Handshake(self._instance, self._ranks, check, self._incompatible)
        self._peers = PeerTable(secret, handshake)
        self._address = InstanceAddress(
            self._instance.engine_id,
            config.advertise_host or config.host,
            server.port,
            self._instance.tp_size,
            self._instance.block_size,
            config.lease_s,
            len(self._instance.geometry.tables),
        )
        for task in (*self._open_flows(context), self._peers.sweep()):
            self._loop.spawn_housekeeping(task)
        host = self._address.host
        advertised = "" if host == config.host else f", {host} for peers"
        logger.info("KV side channel on %s port %d%s", config.host, server.port, advertised)

    def _make_rank_loads(self, context: ConnectorContext) -> RankLoads:
        """The loads that are sent to all ranks of this instance."""
        limit_s = self._config.transfer_timeout_s + REPORT_TIMEOUT_S
        return RankLoads(self._ranks, limit_s, context.has_stalled)

    async def _shut_down(self) -> None:
        if not await self._drain():
            # To peers, a closed port proves that this process writes no more: keep it open.
            logger.error(
                "writes to peers could not be drained; the peers' blocks stay reserved until this "
                "process ends"
            )
            return
        self._peers.close()
        self._server.close()
        for _ in range(CLOSING_ITERATIONS):
            await asyncio.sleep(0)


def _common_transports(ranks: Sequence[RankReady]) -> dict[str, TransportConstraints]:
    """The transports that every rank has open. Their constraints are the same on all ranks."""
    first, *others = ranks
    return {
        name: constraints
        for name, constraints in first.transports.items()
        if all(name in other.transports for other in others)
    }


def _host() -> str:
    """This host's identity; empty if the kernel does not provide one."""
    try:
        return host_identity()
    except OSError:
        return ""


def _ports(config: KVTransferConfig) -> Iterable[int]:
    """The ports that the side channel may listen on; 0 is any free port."""
    return config.port_range if config.port_range and not config.port else (config.port,)
