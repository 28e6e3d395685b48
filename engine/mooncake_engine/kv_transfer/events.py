"""What a connector tells the engine's core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mooncake_engine.scheduling.request import FirstToken


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load is over; its KV is complete if ``error`` is None.

    Args:
        request_id: whose.
        error: why it failed.
        first_token: the peer's token, if it came with the KV.
        is_drained: False if the peer may still write; another LoadEnded follows then.
    """

    request_id: str
    error: str | None
    first_token: FirstToken | None = None
    is_drained: bool = True


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
