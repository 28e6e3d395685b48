"""Every error of the engine; those of moving KV are in ``mooncake_kv.errors``.

EngineError
├── ConfigError            the engine can't be set up as asked; nothing was loaded
│   └── PortTaken
├── CheckpointError        a model directory that is missing, incomplete or unsupported
├── DownloadFailed         a model that a hub has, and that can't be fetched now
├── InvalidRequest         the client's request is wrong; carries the field and an HTTP status
│   └── PromptTooLong
├── Overloaded             the engine's queue is full; try again later
├── RequestFailed          a request that was accepted and could not be finished
│   ├── DeadlineExceeded   it was not finished within its own time limit
│   └── GrammarFailed      its own grammar can't be followed any further
├── EngineStalled          a step takes so long that nobody should wait for this instance
└── EngineDead             a background task died; every request fails, health turns red
    └── EngineStuck        by a step that does not return, in a thread that can't be ended
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything that mooncake_engine raises on purpose."""


class ConfigError(EngineError):
    """The engine can't be set up as asked: what was wanted, what was found, what to do."""


class PortTaken(ConfigError):
    """A port that the instance needs is in use."""


class CheckpointError(EngineError):
    """A model directory that is missing, incomplete, or of an unsupported kind."""


class DownloadFailed(EngineError):
    """A model that a hub has can't be fetched: what keeps it, and what to do."""


class InvalidRequest(EngineError):
    """A request that can't be served as it is.

    Args:
        message: what was wanted, found, and what to do.
        param: the request's field at fault, if there is one.
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
    """A request that was accepted and could not be finished."""


class DeadlineExceeded(RequestFailed):
    """A request that was not finished within its own time limit."""


class GrammarFailed(RequestFailed):
    """The request's own grammar can't be followed any further; carries the field at fault."""

    param = "response_format"


class EngineStalled(EngineError):
    """A step takes so long that nobody should wait for this instance; it may go on yet."""


class EngineDead(EngineError):
    """A background task of the engine died; the first cause is chained."""


class EngineStuck(EngineDead):
    """A step does not return, and its thread can't be ended: the process has to be."""
