"""What the engine's core knows of a connector, and how connectors are found by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol, cast

import msgspec

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError
from mooncake_engine.kv_transfer.events import EventSink
from mooncake_engine.kv_transfer.params import TransferMode
from mooncake_engine.scheduling.kv_connector import KVConnector
from mooncake_hal.deployment import CONNECTOR_GROUP, Hardware
from mooncake_hal.kv.geometry import KVGeometry


@dataclass(frozen=True, slots=True)
class ConnectorSetup:
    """What a connector is built from.

    Args:
        config: of the instance, with ``kv_transfer`` set.
        engine_id: name of this incarnation.
        geometry: of the model's KV.
        block_size: tokens per block.
        hardware: what the instance runs on.
        tokenizer_fingerprint: of the tokenizer's files.
        send: carries a message to a rank's worker side.
        sink: takes the connector's events, from any thread.
    """

    config: EngineConfig
    engine_id: str
    geometry: KVGeometry
    block_size: int
    hardware: Hardware
    tokenizer_fingerprint: str
    send: Callable[[int, bytes], None]
    sink: EventSink


class RankEndpointFacts(msgspec.Struct, frozen=True):
    """How a rank is reached: transport name to address."""

    endpoints: dict[str, bytes]


class Topology(msgspec.Struct, frozen=True):
    """What an instance publishes to those who want to reach it.

    Args:
        engine_id: name of this incarnation.
        host, port: its side channel.
        tp_size, pp_size: ranks of a pipeline stage, and stages.
        block_size: tokens per block.
        backend, generation: what it runs on.
        ranks: each rank's endpoints, stage after stage.
    """

    engine_id: str
    host: str
    port: int
    tp_size: int
    pp_size: int
    block_size: int
    backend: str
    generation: str
    ranks: tuple[RankEndpointFacts, ...]


class Pairing(msgspec.Struct, frozen=True):
    """Who can't exchange KV, for those who choose pairs of instances.

    Args:
        engine_id: name of this incarnation.
        refused_peers: incarnations whose handshake with it was refused.
    """

    engine_id: str
    refused_peers: tuple[str, ...]


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

    def pairing(self) -> Pairing:
        """Whom this instance can't exchange KV with, as far as it has been tried. Any thread."""
        ...

    def topology(self) -> Topology:
        """Where this instance is to be reached, and what it is. Any thread, once started."""
        ...

    def close(self) -> None:
        """Stop. What is held or loading is given up. Idempotent."""
        ...


class ConnectorType(Protocol):
    """A connector's class, as ``find_connector`` returns it."""

    mode: TransferMode
    """Which side moves the bytes."""
    worker: str
    """Name of its worker side, an ExtensionFactory: ``"module:attribute"``."""

    def __call__(self, setup: ConnectorSetup) -> Connector:
        """Construct its core side."""
        ...


def find_connector(name: str) -> ConnectorType:
    """The connector of that name; connectors are entry points of the group CONNECTOR_GROUP.

    Raises:
        ConfigError: there is none, or its module can't be loaded; lists those there are.
    """
    known = {point.name: point for point in entry_points(group=CONNECTOR_GROUP)}
    if name not in known:
        raise ConfigError(f"KV connector {name!r} is not known; known are {sorted(known)}")
    try:
        return cast(ConnectorType, known[name].load())
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"KV connector {name!r} can't be loaded from {known[name].value}: {exc}"
        ) from exc
