"""Every error of the engine.

EngineError
├── ConfigError            the engine can't be set up as asked; nothing was loaded
│   └── PortTaken
├── CheckpointError        a model directory that is missing, incomplete or unsupported
├── InvalidRequest         the client's request is wrong; carries the field and an HTTP status
│   └── PromptTooLong
├── Overloaded             the engine's queue is full; try again later
├── RequestFailed          a request that was accepted and could not be finished
│   └── DeadlineExceeded   it was not finished within its own time limit
├── KVTransferError        KV did not come across; the request says what happens next
│   ├── HandshakeRefused   the peer's facts contradict ours
│   ├── LeaseLost          the peer no longer holds the KV that it promised
│   ├── PeerGone           that incarnation of the peer is dead for certain
│   └── PeerAbsent         it does not answer at its address: dead, or the way there has changed
└── EngineDead             a background task died; every request fails, health turns red
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


class InvalidRequest(EngineError):
    """A request that can't be served as it is.

    Args:
        message: what was wanted, found, and what to do.
        param: the request's field at fault, if there is one.
        status: HTTP status of the answer.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for an answer in the model's context."""


class Overloaded(EngineError):
    """The engine's queue is full; the client may try again later."""


class RequestFailed(EngineError):
    """A request that was accepted and could not be finished."""


class DeadlineExceeded(RequestFailed):
    """A request that was not finished within its own time limit."""


class KVTransferError(EngineError):
    """KV did not come across."""


class HandshakeRefused(KVTransferError):
    """The peer's facts contradict ours; both values are in the message."""


class LeaseLost(KVTransferError):
    """The peer no longer holds, or never held, the KV that it promised."""


class PeerGone(KVTransferError):
    """That incarnation of a peer is dead for certain: nothing of it writes any more."""


class PeerAbsent(KVTransferError):
    """Nobody listens at a peer's address, or somebody else does: it is dead, or what stands between
    (a load balancer, an address that was translated) leads elsewhere now, and it may still write
    until its lease is over."""


class EngineDead(EngineError):
    """A background task of the engine died; the first cause is chained."""
