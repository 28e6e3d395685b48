"""What is said to a core and by it: commands, and the messages between its process and those that
serve requests."""

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
"""First byte of a message that is a msgpack list of updates; of any other it is ``OTHER``."""
OTHER = 1

encode_updates = msgspec.msgpack.Encoder().encode
decode_updates = msgspec.msgpack.Decoder(list[TokenUpdate]).decode


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A request to serve; it has been checked against the engine's limits."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """A request to end, or a lease to give up."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget the KV of finished prompts; ``reply`` hears, on the core's thread, whether it was
    done."""

    reply: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class PrepareGrammar:
    """Have the ranks compile a grammar before its request is added; ``reply`` hears, on any thread,
    that they have."""

    grammar: Grammar
    reply: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class ReadFigures:
    """Have ``stats`` and the like show what is so now; ``reply`` hears that they do. Only for a
    core whose ``figures_lag``."""

    reply: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing to do but to look again."""


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
    """A core as ``AsyncEngine`` drives it: an ``EngineCore``, whose methods these are, or a
    ``CoreConnection`` for one in a process of its own."""

    watch: StepWatch

    @property
    def figures_lag(self) -> bool:
        """Whether ``stats`` and the like are some time old."""

    @property
    def post(self) -> Callable[[Command], None]: ...

    @property
    def compiles_grammars(self) -> bool: ...

    def step(self) -> list[TokenUpdate]: ...

    def abandon_step(self) -> EngineDead: ...

    def stats(self) -> EngineStats: ...

    def pairing(self) -> CompatibilityReport | None: ...

    def topology(self) -> Topology | None: ...

    def kv_event_endpoints(self) -> KVEventEndpoints | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is; in bytes of this rank's share.

    Args:
        loaded_bytes: read so far.
        total_bytes: to read.
    """

    loaded_bytes: int
    total_bytes: int

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return self.loaded_bytes / self.total_bytes if self.total_bytes else 1.0


ProgressHandler = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class Start:
    """First message to the core.

    Args:
        config: what to load.
        log: how it looks; it goes to the same standard error.
    """

    config: EngineConfig
    log: LogSettings


@dataclass(frozen=True, slots=True)
class Ask:
    """A command whose reply is wanted; ``Reply`` has the number."""

    number: int
    command: ResetPrefixCache | PrepareGrammar | ReadFigures


@dataclass(frozen=True, slots=True)
class Stop:
    """Close everything and exit."""


@dataclass(frozen=True, slots=True)
class Reply:
    """To ``Ask``."""

    number: int
    value: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What others ask a core for between steps: some ten times a second if it has changed, with the
    last update of each request to those who serve it, and when it is asked for."""

    stats: EngineStats
    pairing: CompatibilityReport | None
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
    """The core ends, or never began.

    Args:
        kind: class of the error.
        reason: its words.
    """

    kind: str
    reason: str


Message = LoadProgress | Started | Reply | Report | Failed
