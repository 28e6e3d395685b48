"""The transports that a rank has open, and its connections to peers' ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TypedDict

from mooncake_engine.config import KVTransferConfig
from mooncake_engine.errors import ConfigError
from mooncake_hal.backend import Backend
from mooncake_hal.errors import HalError
from mooncake_hal.negotiation import AUTO, Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions, MemoryRegion, Peer

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class Wanted(TypedDict):
    """See ``Transports.open``."""

    wanted: str
    allowed: Sequence[str]


def transports_wanted(config: KVTransferConfig, backend: Backend) -> Wanted:
    """Which transports a rank opens: those that were asked for, or all that move its memory."""
    forced = config.transports
    return Wanted(
        wanted=forced[0] if len(forced) == 1 else AUTO,
        allowed=forced or backend.capabilities.transports,
    )


class RankEndpoints:
    """A rank's KV pool, registered with every transport it may use. Any thread.

    Args:
        config: names the transports wanted, and the deployment's secret.
        backend: knows which ones can move its memory.
        region: the rank's KV pool, which says where it lies.

    Raises:
        ConfigError: a transport that was asked for can't be used here, or none can.
    """

    def __init__(self, config: KVTransferConfig, backend: Backend, region: MemoryRegion) -> None:
        self._peers: dict[tuple[str, int], Peer] = {}
        self._connecting: dict[tuple[str, int], threading.Lock] = {}
        self._lock = threading.Lock()
        secret = config.secret.encode()
        options = EndpointOptions(
            host=config.host,
            advertise_host=config.advertise_host or None,
            port_range=config.port_range,
            secret=secret,
            device=region.device,
        )
        try:
            self._transports = Transports.open(
                Registry.discover(), options, **transports_wanted(config, backend)
            )
            self._transports.register(region)
        except (HalError, ValueError, OSError) as exc:  # ValueError: a setting that can't be
            raise ConfigError(f"KV can't be moved as asked: {exc}") from exc

    @property
    def addresses(self) -> dict[str, bytes]:
        """What peers connect to, by transport, best first."""
        return self._transports.addresses

    @property
    def can_revoke(self) -> bool:
        """Whether each of these transports stops what is in flight; see ``Transport``."""
        return self._transports.can_revoke

    def peer(self, engine_id: str, rank: int, addresses: dict[str, bytes]) -> Peer:
        """The connection to a peer's rank, made at first use by the best common transport.

        Raises:
            TransportUnavailable: no common transport reaches it; says why for each.
            TransferError: it can't be connected to.
        """
        with self._lock:
            connecting = self._connecting.setdefault((engine_id, rank), threading.Lock())
        with connecting:  # whoever else wants this peer waits; those who want others do not
            known = self._peers.get((engine_id, rank))
            if known is not None:
                return known
            choice = self._transports.connect(addresses, timeout=CONNECT_TIMEOUT_S)
            with self._lock:
                self._peers[engine_id, rank] = choice.peer
        logger.info("%s rank %d: %s", engine_id, rank, choice.reason)
        return choice.peer

    def forget(self, engine_id: str) -> None:
        """Drop the connections to all ranks of a peer. Idempotent."""
        with self._lock:
            keys = [key for key in self._peers if key[0] == engine_id]
            peers = [self._peers.pop(key) for key in keys]
            for key in [key for key in self._connecting if key[0] == engine_id]:
                del self._connecting[key]
        for peer in peers:
            peer.close()

    def close(self) -> None:
        """Close all connections and endpoints. Idempotent."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        self._transports.close()
