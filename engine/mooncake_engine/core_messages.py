"""Commands to an engine core, and the messages between its process and the API processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import EngineDead
from mooncake_engine.messages import EngineInfo, EngineRequest, EngineStats, TokenUpdate
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.step_watchdog import StepWatch
from mooncake_hal.command_line import LogSettings
from mooncake_kv.connector import CompatibilityReport, Event, Topology
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.pool.pool_events import PoolEvent

UPDATES = 0
"""First byte of a message that is a msgpack list of updates; ``OTHER`` marks pickled messages."""
OTHER = 1

encode_updates = msgspec.msgpack.Encoder().encode
decode_updates = msgspec.msgpack.Decoder(list[TokenUpdate]).decode


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Serve a request, which has been checked against the engine's limits."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End a request, or release the lease of a finished one."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Drop all cached prefixes; ``reply`` is called on the core's thread, with False if a block was
    in use and nothing was dropped."""

    reply: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Have the ranks compile a grammar before its request is added; ``reply`` is called, on any
    thread, when they have."""

    grammar: Grammar
    reply: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class ReadFigures:
    """Refresh ``stats`` and the other figures of a core whose ``figures_lag``; ``reply`` is called
    once they are current."""

    reply: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a waiting core, so that it checks its state again."""


Command = (
    AddRequest
    | AbortRequest
    | ResetPrefixCache
    | PrepareGrammar
    | ReadFigures
    | Wake
    | Event
    | PoolEvent
)


class Core(Protocol):
    """A core as ``AsyncEngine`` drives it; ``EngineCore`` documents the methods. Implemented by
    ``EngineCore``, ``DataParallelCore``, and ``CoreConnection`` for a core in another process."""

    watch: StepWatch

    @property
    def figures_lag(self) -> bool:
        """Whether ``stats`` and the other figures may be out of date, as reports of another process
        are."""

    @property
    def post(self) -> Callable[[Command], None]: ...

    @property
    def compiles_grammars(self) -> bool: ...

    def step(self) -> list[TokenUpdate]: ...

    def abandon_step(self) -> EngineDead: ...

    def stats(self) -> EngineStats: ...

    def compatibility(self) -> CompatibilityReport | None: ...

    def topology(self) -> Topology | None: ...

    def kv_event_endpoints(self) -> KVEventEndpoints | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading the weights of one rank.

    Args:
        loaded_bytes: bytes read so far.
        total_bytes: bytes to read in all.
    """

    loaded_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        """The fraction that is loaded, 0 to 1."""
        return self.loaded_bytes / self.total_bytes if self.total_bytes else 1.0


ProgressHandler = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a core process.

    Args:
        config: the engine's config.
        log: format and level of its log, which goes to the same standard error.
    """

    config: EngineConfig
    log: LogSettings


@dataclass(frozen=True, slots=True)
class Ask:
    """A command that is answered by a ``Reply`` with the same number."""

    number: int
    command: ResetPrefixCache | PrepareGrammar | ReadFigures


@dataclass(frozen=True, slots=True)
class Stop:
    """Close everything and exit."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to an ``Ask``."""

    number: int
    value: bool


@dataclass(frozen=True, slots=True)
class Report:
    """A core's figures, for API processes to serve from. Sent about ten times a second if they have
    changed, before the last update of each request, and in response to ``ReadFigures``."""

    stats: EngineStats
    compatibility: CompatibilityReport | None
    topology: Topology | None
    kv_event_endpoints: KVEventEndpoints | None


@dataclass(frozen=True, slots=True)
class Started:
    """The core is ready to step."""

    info: EngineInfo
    compiles_grammars: bool
    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """The core has died, or could not start.

    Args:
        kind: class name of the error.
        reason: message of the error.
    """

    kind: str
    reason: str


Message = LoadProgress | Started | Reply | Report | Failed
