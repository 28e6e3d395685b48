"""Every error of the engine; errors of KV transfer are in ``mooncake_kv.errors``.

EngineError
├── ConfigError            the engine can't be set up as configured; nothing was loaded
│   └── PortInUse
├── CheckpointError        a model directory that is missing, incomplete or unsupported
├── DownloadFailed         a model of a hub that can't be fetched now
├── InvalidRequest         the client's request is invalid; carries the field and an HTTP status
│   └── PromptTooLong
├── Overloaded             the engine's queue is full; try again later
├── RequestFailed          a request that was accepted but could not be finished
│   ├── DeadlineExceeded   it was not finished within its own timeout
│   └── GrammarFailed      its own grammar allows no further token
├── EngineStalled          a step takes so long that requests should go to another instance
└── EngineDead             a background task died; all requests fail, health checks fail
    └── EngineStuck        a step hangs in a thread that can't be ended
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of all errors that mooncake_engine raises deliberately."""


class ConfigError(EngineError):
    """The engine can't be set up as configured. The message says what was wanted, what was found,
    and what to change."""


class PortInUse(ConfigError):
    """A port that the instance needs is in use."""


class CheckpointError(EngineError):
    """A model directory is missing, incomplete, or of an unsupported kind."""


class DownloadFailed(EngineError):
    """A model of a hub can't be fetched. The message says why, and what to do."""


class InvalidRequest(EngineError):
    """A request is invalid.

    Args:
        message: what was wanted, what was found, and what to do.
        param: the field at fault; None if there is no single one.
        status: HTTP status of the response.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for output in the model's context."""


class Overloaded(EngineError):
    """The engine's queue is full; the client may try again later."""


class RequestFailed(EngineError):
    """A request was accepted but could not be finished."""


class DeadlineExceeded(RequestFailed):
    """A request was not finished within its own timeout."""


class GrammarFailed(RequestFailed):
    """A request's own grammar allows no further token; carries the field at fault."""

    param = "response_format"


class EngineStalled(EngineError):
    """A step takes so long that requests should go to another instance; it may still complete."""


class EngineDead(EngineError):
    """A background task of the engine died; its first cause is chained."""


class EngineStuck(EngineDead):
    """A step hangs in a thread that can't be ended, so the process must exit."""
