"""What a connector tells the engine's core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load is over and drained; its KV is complete if ``error`` is None."""

    request_id: str
    error: str | None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A finished prefill's blocks are no longer held for anybody."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ConnectorFailed:
    """A background task of the connector died; so does the engine."""

    cause: BaseException


Event = LoadEnded | LeaseEnded | ConnectorFailed
EventSink = Callable[[Event], None]
