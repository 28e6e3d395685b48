"""Commands to an engine core, and the messages between its process and the API processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import EngineDead
from mooncake_engine.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    TokenUpdate,
    pack_tokens,
    unpack_tokens,
)
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
class RefreshReport:
    """Bring ``report`` up to date where ``report_lags``; ``reply`` is called once it is."""

    reply: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake a waiting core, so that it checks its state again."""


Command = (
    AddRequest
    | AbortRequest
    | ResetPrefixCache
    | PrepareGrammar
    | RefreshReport
    | Wake
    | Event
    | PoolEvent
)


class Core(Protocol):
    """A core as ``AsyncEngine`` drives it; ``EngineCore`` documents the methods. Implemented by
    ``EngineCore``, ``DataParallelCore``, and ``CoreConnection`` for a core in another process."""

    watch: StepWatch

    @property
    def report_lags(self) -> bool:
        """Whether ``report`` may be out of date, as that of another process is."""

    @property
    def post(self) -> Callable[[Command], None]: ...

    @property
    def compiles_grammars(self) -> bool: ...

    def step(self) -> list[TokenUpdate]: ...

    def abandon_step(self) -> EngineDead: ...

    def report(self) -> CoreReport: ...

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
    command: ResetPrefixCache | PrepareGrammar | RefreshReport


@dataclass(frozen=True, slots=True)
class RequestWithoutPrompt:
    """``AddRequest`` as it travels to a core's process: the prompt of several choices only once.

    Args:
        request: the request, with an empty prompt.
        prompt: the packed prompt; None for that of the last request on the connection.
    """

    request: EngineRequest
    prompt: bytes | None


class PromptEncoder:
    """Takes the prompts out of the requests on one connection. Their order must be kept."""

    def __init__(self) -> None:
        self._last: Sequence[int] = ()

    def take_out(self, request: EngineRequest) -> RequestWithoutPrompt:
        """Returns the request without its prompt."""
        prompt, last = request.prompt_token_ids, self._last
        self._last = prompt
        packed = None if prompt is last else pack_tokens(prompt)
        return RequestWithoutPrompt(replace(request, prompt_token_ids=()), packed)


class PromptDecoder:
    """Completes the requests of one connection; choices of a prompt share one tuple of tokens."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()

    def complete(self, message: RequestWithoutPrompt) -> EngineRequest:
        """Returns the request with its prompt."""
        if message.prompt is not None:
            self._last = unpack_tokens(message.prompt)
        return replace(message.request, prompt_token_ids=self._last)


@dataclass(frozen=True, slots=True)
class Stop:
    """Close everything and exit."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to an ``Ask``."""

    number: int
    value: bool


@dataclass(frozen=True, slots=True)
class CoreReport:
    """How a core is. A core in a process of its own sends it to API processes about ten times a
    second if it has changed, before the last update of each request, and in response to
    ``RefreshReport``.

    Args:
        stats: a snapshot for metrics, whose numbers may be one step apart.
        compatibility: the peers it can't exchange KV with; None without a connector.
        topology: where peers reach this instance; None without a connector.
        kv_event_endpoints: the endpoints of its KV events; None if it publishes none.
    """

    stats: EngineStats
    compatibility: CompatibilityReport | None
    topology: Topology | None
    kv_event_endpoints: KVEventEndpoints | None


@dataclass(frozen=True, slots=True)
class Started:
    """The core is ready to step."""

    info: EngineInfo
    compiles_grammars: bool
    report: CoreReport


@dataclass(frozen=True, slots=True)
class Failed:
    """The core has died, or could not start.

    Args:
        kind: class name of the error.
        reason: message of the error.
    """

    kind: str
    reason: str


Message = LoadProgress | Started | Reply | CoreReport | Failed
