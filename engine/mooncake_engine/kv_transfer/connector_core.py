"""What every connector's core side does: wait for ranks, bind the side channel, live, end."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable
from typing import Any

import zmq.asyncio

from mooncake_engine.config import KVTransferConfig
from mooncake_engine.errors import ConfigError, PortTaken
from mooncake_engine.kv_transfer.base import ConnectorSetup, Pairing, RankEndpointFacts, Topology
from mooncake_engine.kv_transfer.context import SideContext
from mooncake_engine.kv_transfer.events import ConnectorFailed
from mooncake_engine.kv_transfer.facts import InstanceFacts, model_fingerprint
from mooncake_engine.kv_transfer.io_loop import IoLoop
from mooncake_engine.kv_transfer.params import Holder
from mooncake_engine.kv_transfer.peers import CheckFit, PeerBook, Ranks
from mooncake_engine.kv_transfer.protocol import AnyMessage
from mooncake_engine.kv_transfer.rank_messages import RankReady
from mooncake_engine.kv_transfer.refusals import Refusals
from mooncake_engine.kv_transfer.side_channel import SideChannelServer
from mooncake_hal.transports.shm.host import host_identity

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0


class ConnectorCore(ABC):
    """Life cycle of a connector's core side. Its subclass brings both halves.

    Args:
        setup: what it is built from.
        ranks: of this instance.
        check_fit: judges peers that this instance asks.

    Raises:
        ConfigError: there is no ``kv_transfer`` configuration.
    """

    def __init__(self, setup: ConnectorSetup, ranks: Ranks, check_fit: CheckFit) -> None:
        config = setup.config.kv_transfer
        if config is None:
            raise ConfigError("a KV connector needs a kv_transfer configuration")
        self._setup = setup
        self._config = config
        self._ranks = ranks
        self._check_fit = check_fit
        self._refusals = Refusals()
        self._readiness: dict[int, RankReady] = {}
        self._ranks_ready = threading.Event()
        self._loop = IoLoop("kv-connector", lambda exc: setup.sink(ConnectorFailed(exc)))
        self._is_started = False

    @abstractmethod
    def _open_sides(self, context: SideContext) -> list[Coroutine[Any, Any, None]]:
        """Build both halves; returns what runs beside them until the end. Loop thread."""

    @abstractmethod
    def _handle(self, message: AnyMessage) -> AnyMessage:
        """Answer a peer; quick, and raises nothing but HandshakeRefused. Loop thread."""

    @abstractmethod
    async def _drain(self) -> bool:
        """End what must not go on after the side channel has fallen silent; False if something
        does. Loop thread."""

    def _rank_is_ready(self, rank: int, ready: RankReady) -> None:
        """A rank has opened its transports. Any thread."""
        self._readiness[rank] = ready
        if len(self._readiness) == self._setup.config.num_ranks:
            self._ranks_ready.set()

    def start(self) -> None:
        """See ``Connector``."""
        try:
            if not self._ranks_ready.wait(START_TIMEOUT_S):
                raise ConfigError(
                    f"{len(self._readiness)} of {self._setup.config.num_ranks} ranks opened their "
                    f"transports within {START_TIMEOUT_S:g} s"
                )
            self._loop.run(self._open(), START_TIMEOUT_S)
        except BaseException:
            self._loop.close()
            raise
        self._is_started = True

    def close(self) -> None:
        """See ``Connector``."""
        if self._is_started:
            self._is_started = False
            self._loop.run(self._shut(), START_TIMEOUT_S + self._config.transfer_timeout_s)
        self._loop.close()

    def pairing(self) -> Pairing:
        """See ``Connector``."""
        return Pairing(self._setup.engine_id, self._refusals.engine_ids)

    def topology(self) -> Topology:
        """See ``Connector``."""
        facts = self._facts()
        return Topology(
            facts.engine_id,
            self._holder.host,
            self._holder.port,
            facts.tp_size,
            facts.pp_size,
            facts.block_size,
            facts.hardware.backend,
            facts.hardware.generation,
            tuple(RankEndpointFacts(rank.endpoints) for rank in facts.ranks),
        )

    async def _open(self) -> None:
        setup, config = self._setup, self._config
        secret = config.secret.encode()
        self._context = zmq.asyncio.Context()
        try:
            server = SideChannelServer(
                self._context, config.host, _ports(config), secret, self._handle
            )
        except PortTaken:
            self._context.destroy(linger=0)
            raise
        self._server = server
        self._peers = PeerBook(
            self._context,
            secret,
            self._ranks,
            self._loop.spawn,
            self._check_fit,
            self._refusals,
        )
        self._holder = Holder(
            setup.engine_id,
            config.advertise_host or config.host,
            server.port,
            setup.config.tp_size,
            setup.block_size,
            config.lease_s,
        )
        context = SideContext(
            self._facts(),
            config.lease_s,
            setup.sink,
            self._loop.spawn,
            can_revoke=all(ready.can_revoke for ready in self._readiness.values()),
            landing_s=config.transfer_timeout_s,
            refusals=self._refusals,
        )
        for task in (*self._open_sides(context), server.serve(), self._peers.sweep()):
            self._loop.spawn(task)
        told = "" if self._holder.host == config.host else f", {self._holder.host} for peers"
        logger.info("KV side channel on %s port %d%s", config.host, server.port, told)

    def _facts(self) -> InstanceFacts:
        setup = self._setup
        return InstanceFacts(
            setup.engine_id,
            model_fingerprint(setup.config.model),
            setup.tokenizer_fingerprint,
            setup.geometry,
            setup.block_size,
            setup.hardware,
            tuple(self._readiness[rank].facts for rank in range(setup.config.num_ranks)),
            _host(),
        )

    async def _shut(self) -> None:
        if not await self._drain():
            # A port that nobody listens on says that nobody writes: keep it until the process ends.
            logger.error("writes to peers have not ended; their blocks stay reserved until we do")
            return
        self._peers.close()
        self._server.close()
        self._context.destroy(linger=0)


def _host() -> str:
    """See ``InstanceFacts``; a kernel may not show what tells it from others."""
    try:
        return host_identity()
    except OSError:
        return ""


def _ports(config: KVTransferConfig) -> Iterable[int]:
    """What the side channel may listen on; 0 is any free port."""
    return config.port_range if config.port_range and not config.port else (config.port,)
