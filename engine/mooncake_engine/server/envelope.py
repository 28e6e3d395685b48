"""What comes beside a request's body: its headers, understood."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.server.request_ids import request_id_from

TIMEOUT_HEADER = "X-Request-Timeout"


@dataclass(frozen=True, slots=True)
class Envelope:
    """A request's headers.

    Args:
        request_id: the client's ``X-Request-Id``, or a new one.
        timeout_text: ``X-Request-Timeout`` as it came.
        trace_parent: W3C ``traceparent``, for whoever traces.
    """

    request_id: str
    timeout_text: str | None = None
    trace_parent: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Envelope:
        """Read the headers, whose names are in lower case; nothing is refused yet."""
        return cls(
            request_id_from(headers.get("x-request-id")),
            headers.get(TIMEOUT_HEADER.lower()),
            headers.get("traceparent"),
        )

    def timeout_s(self, in_body: float | None) -> float | None:
        """How long the request may take, in seconds: the shorter of body and header.

        Raises:
            InvalidRequest: not a positive number of seconds.
        """
        limits = [] if in_body is None else [_seconds(in_body, "timeout")]
        if self.timeout_text is not None:
            limits.append(_seconds(self.timeout_text, TIMEOUT_HEADER))
        return min(limits, default=None)


def _seconds(value: float | str, name: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise InvalidRequest(
            f"{name} must be a positive number of seconds, got {value}", param=name
        )
    return seconds
