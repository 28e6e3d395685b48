"""What the engine's core knows of a connector, and how connectors are found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.kv_transfer.events import EventSink
from mooncake_engine.kv_transfer.params import TransferMode
from mooncake_engine.scheduling.kv_connector import KVConnector
from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import KVGeometry


@dataclass(frozen=True, slots=True)
class ConnectorSetup:
    """What a connector is built from.

    Args:
        config: of the instance, with ``kv_transfer`` set.
        engine_id: name of this incarnation.
        geometry: of the model's KV.
        hardware: what the instance runs on.
        tokenizer_fingerprint: of the tokenizer's files.
        send: carries a message to a rank's worker side.
        sink: takes the connector's events, from any thread.
    """

    config: EngineConfig
    engine_id: str
    geometry: KVGeometry
    hardware: Hardware
    tokenizer_fingerprint: str
    send: Callable[[int, bytes], None]
    sink: EventSink


class Connector(KVConnector, Protocol):
    """A connector's core side, as the core sees it: a scheduler's connector with a life cycle."""

    def on_rank_message(self, rank: int, message: bytes) -> None:
        """A rank's worker side says something. Any thread; returns at once."""
        ...

    def start(self) -> None:
        """Wait for the ranks, bind the ports, begin to answer peers.

        Raises:
            PortTaken: a port is in use.
            ConfigError: a rank did not come up.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Figures by name, for metrics."""
        ...

    def close(self) -> None:
        """Stop. What is held or loading is given up. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectorEntry:
    """Where a connector's two sides are, as ``"module:attribute"``, and what it does."""

    core: str
    worker: str
    mode: TransferMode


CONNECTORS = {
    "MooncakeConnector": ConnectorEntry(
        core="mooncake_engine.kv_transfer.connector:MooncakeConnector",
        worker="mooncake_engine.kv_transfer.pull_worker:PullWorker",
        mode=TransferMode.PULL,
    ),
    "MooncakeLayerwiseConnector": ConnectorEntry(
        core="mooncake_engine.kv_transfer.push_connector:MooncakeLayerwiseConnector",
        worker="mooncake_engine.kv_transfer.push_worker:PushWorker",
        mode=TransferMode.PUSH,
    ),
}
"""Connectors by name. ``module:attribute`` pairs, so that naming one imports nothing."""


def find_connector(name: str) -> ConnectorEntry:
    """The entry of that name.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if name not in CONNECTORS:
        raise ConfigError(f"KV connector {name!r} is not known; known are {sorted(CONNECTORS)}")
    return CONNECTORS[name]


def build_connector(entry: ConnectorEntry, setup: ConnectorSetup) -> Connector:
    """Import and construct a connector's core side.

    Raises:
        ConfigError: its module can't be loaded.
    """
    module, _, attribute = entry.core.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"KV connector {entry.core!r} can't be loaded: {exc}") from exc
    return cast(Connector, factory(setup))
