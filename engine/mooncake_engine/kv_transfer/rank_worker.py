"""What both connectors do beside a rank's KV pool: open transports, take orders, end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import msgspec

from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.extension import ExtensionContext
from mooncake_engine.kv_transfer.endpoints import RankEndpoints
from mooncake_engine.kv_transfer.facts import RankFacts
from mooncake_engine.kv_transfer.rank_messages import RankReady


class RankWorker(ABC):
    """One rank's half of a connector. Its subclass moves the bytes.

    Args:
        context: the rank's pool, hardware, and way to the core.

    Raises:
        ConfigError: there is no ``kv_transfer`` configuration, or it can't be followed here.
    """

    def __init__(self, context: ExtensionContext) -> None:
        config = context.config.kv_transfer
        if config is None:
            raise ConfigError(f"{type(self).__name__} needs a kv_transfer configuration")
        self.context = context
        self._timeout_s = config.transfer_timeout_s
        self._transports = RankEndpoints(config, context.backend, context.pool.region)
        self._lock = threading.Lock()
        self._is_closed = False

    @abstractmethod
    def _obey(self, message: bytes) -> None:
        """Act on a message from the core. The lock is held."""

    @abstractmethod
    def _drain(self) -> None:
        """End what moves, and wait for that; no message comes any more."""

    def receive(self, message: bytes) -> None:
        """See ``WorkerExtension``; what comes when it closes is for nobody any more."""
        with self._lock:
            if not self._is_closed:
                self._obey(message)

    def close(self) -> None:
        """See ``WorkerExtension``."""
        with self._lock:
            self._is_closed = True
        self._drain()
        self._transports.close()

    def _announce(self) -> None:
        """Tell the core what is here and how to reach it; orders may come from now on."""
        pool, transports = self.context.pool, self._transports
        facts = RankFacts(pool.shard, pool.layout, transports.addresses)
        self.context.emit(msgspec.msgpack.encode(RankReady(facts, transports.can_revoke)))
