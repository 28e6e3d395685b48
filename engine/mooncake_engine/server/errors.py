"""Errors in OpenAI's form, and the HTTP status of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from mooncake_engine.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
)
from mooncake_engine.server.streams import RequestAborted, ShuttingDown

_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error as a client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None

    @property
    def body(self) -> bytes:
        """OpenAI's error object, encoded."""
        error: dict[str, Any] = {"message": self.message, "type": self.type}
        return msgspec.json.encode({"error": error | {"param": self.param, "code": self.code}})

    def response(self) -> Response:
        """The answer, where nothing has been sent yet."""
        headers = {"Retry-After": str(_RETRY_AFTER_S)} if self.status in (429, 503) else None
        return Response(self.body, self.status, headers, media_type="application/json")


def to_api_error(exc: Exception) -> ApiError:
    """What to tell the client. Anything that is not the client's doing is a 5xx."""
    if isinstance(exc, InvalidRequest):
        code = {404: "model_not_found", 413: "request_too_large"}.get(exc.status)
        if isinstance(exc, PromptTooLong):
            code = "context_length_exceeded"
        return ApiError(exc.status, str(exc), "invalid_request_error", exc.param, code)
    if isinstance(exc, Overloaded):
        return ApiError(429, str(exc), "overloaded_error", code="overloaded")
    if isinstance(exc, EngineDead):
        return ApiError(503, str(exc), "server_error", code="engine_dead")
    if isinstance(exc, ShuttingDown):
        return ApiError(503, str(exc), "server_error", code="shutting_down")
    if isinstance(exc, DeadlineExceeded):
        return ApiError(504, str(exc), "timeout", code="deadline_exceeded")
    if isinstance(exc, RequestAborted):
        return ApiError(409, str(exc), "aborted_error", code="aborted")
    return ApiError(500, str(exc) or type(exc).__name__, "server_error")
