"""The transports that a rank has open, and its connections to peers' ranks."""

from __future__ import annotations

import logging
import threading

from mooncake_engine.config import KVTransferConfig
from mooncake_engine.errors import ConfigError
from mooncake_hal.backend import Backend
from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.registry import Registry
from mooncake_hal.transport import Endpoint, EndpointOptions, MemoryRegion, Peer, Transport

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class OpenTransports:
    """One endpoint per transport, all with the same region registered. Any thread.

    Args:
        config: names the transports wanted, and the deployment's secret.
        backend: knows which ones can move its memory, best first.
        device: index of the rank's device.
        region: the rank's KV pool.

    Raises:
        TransportUnavailable: a transport that was asked for can't be used here.
        ConfigError: none can.
    """

    def __init__(
        self, config: KVTransferConfig, backend: Backend, device: int, region: MemoryRegion
    ) -> None:
        self._endpoints: dict[str, tuple[Transport, Endpoint]] = {}
        self._peers: dict[tuple[str, int], Peer] = {}
        self._lock = threading.Lock()
        options = EndpointOptions(
            host=config.host,
            secret=config.secret.encode(),
            device=str(backend.runtime.device(device)),
        )
        wanted = config.transports or backend.capabilities.transports
        for name in wanted:
            self._open(name, options, region, is_forced=bool(config.transports))
        if not self._endpoints:
            raise ConfigError(
                f"none of the transports {list(wanted)} can be used here; "
                "`mooncake-hal devices` says why"
            )

    @property
    def addresses(self) -> dict[str, bytes]:
        """What peers connect to, by transport, best first."""
        return {name: endpoint.address for name, (_, endpoint) in self._endpoints.items()}

    def peer(self, engine_id: str, rank: int, endpoints: dict[str, bytes]) -> Peer:
        """The connection to a peer's rank, made at first use by the best common transport.

        Raises:
            TransportUnavailable: no common transport reaches it; says why for each.
            TransferError: it can't be connected to.
        """
        with self._lock:
            known = self._peers.get((engine_id, rank))
            if known is not None:
                return known
            name = self._choose(endpoints)
            _, endpoint = self._endpoints[name]
            peer = endpoint.connect(endpoints[name], timeout=CONNECT_TIMEOUT_S)
            self._peers[engine_id, rank] = peer
        logger.info("reading from %s rank %d over %s", engine_id, rank, name)
        return peer

    def forget(self, engine_id: str) -> None:
        """Drop the connections to all ranks of a peer. Idempotent."""
        with self._lock:
            keys = [key for key in self._peers if key[0] == engine_id]
            peers = [self._peers.pop(key) for key in keys]
        for peer in peers:
            peer.close()

    def close(self) -> None:
        """Close all connections and endpoints. Idempotent."""
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
            endpoints, self._endpoints = list(self._endpoints.values()), {}
        for peer in peers:
            peer.close()
        for _, endpoint in endpoints:
            endpoint.close()

    def _open(
        self, name: str, options: EndpointOptions, region: MemoryRegion, *, is_forced: bool
    ) -> None:
        try:
            transport = Registry.discover().load_transport(name)
            endpoint = transport.open(options)
        except TransportUnavailable as exc:
            if is_forced:
                raise
            logger.info("transport %s is not used: %s", name, exc.reason)
            return
        endpoint.register(region)
        self._endpoints[name] = (transport, endpoint)

    def _choose(self, remote: dict[str, bytes]) -> str:
        refusals = []
        for name, (transport, endpoint) in self._endpoints.items():
            if name not in remote:
                refusals.append(f"{name}: the peer does not offer it")
                continue
            refusal = transport.reaches(endpoint.address, remote[name])
            if refusal is None:
                return name
            refusals.append(f"{name}: {refusal}")
        raise TransportUnavailable("/".join(self._endpoints), "; ".join(refusals))
