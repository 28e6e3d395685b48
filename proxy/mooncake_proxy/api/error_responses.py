"""Responses that the proxy creates itself: JSON, errors with their status, error events."""

from __future__ import annotations

from typing import Any

from mooncake_proxy.api.openai_bodies import encode, error_body, error_event
from mooncake_proxy.errors import (
    DeadlineExceeded,
    FailedStream,
    ProxyError,
    Refusal,
    Rejected,
    UpstreamError,
)
from mooncake_proxy.http1.http_request import HttpRequest
from mooncake_proxy.http1.http_wire import header_lines

_KEPT_HEADERS = (b"retry-after", b"www-authenticate", b"x-should-retry")
"""Headers of an instance's refusal that the client gets."""
_FINAL_CODES = (b'"aborted"', b'"deadline_exceeded"')
_NO_RETRY = header_lines([("x-should-retry", "false")])
"""Clients of OpenAI and Anthropic repeat requests that got a 409 or 5xx, unless this tells them
that the request has ended for good: it was aborted, or its deadline has passed."""


def respond_json(request: HttpRequest, status: int, value: Any) -> None:
    """Respond with `value` as JSON."""
    request.respond(status, encode(value), "application/json")


def respond_error(request: HttpRequest, error: ProxyError, headers: bytes) -> None:
    """Answer an error: with its status if none was sent yet, else with an SSE error event."""
    if request.ended:
        return
    if request.has_started:
        request.end(_error_event(error))
        return
    if isinstance(error, Rejected):
        kept = (
            (name.decode("latin-1"), error.headers[name].decode("latin-1"))
            for name in _KEPT_HEADERS
            if name in error.headers
        )
        kind = error.headers.get(b"content-type", b"application/json").decode("latin-1")
        request.respond(error.status, error.body, kind, headers + header_lines(kept))
    elif isinstance(error, FailedStream):
        body = b'{"error":%b}' % error.error
        if any(code in error.error for code in _FINAL_CODES):
            headers += _NO_RETRY
        request.respond(error.status, body, "application/json", headers)
    elif isinstance(error, Refusal):
        body = error_body(error.message, error.type, code=error.code, param=error.param)
        request.respond(
            error.status, body, "application/json", headers + header_lines(error.headers)
        )
    else:
        status = error.status if isinstance(error, UpstreamError) else 500
        if isinstance(error, DeadlineExceeded):
            headers += _NO_RETRY
        body = error_body(str(error), _type(error), code=_code(error), param=None)
        request.respond(status, body, "application/json", headers)


def _error_event(error: ProxyError) -> bytes:
    if isinstance(error, FailedStream):
        return error.event
    return error_event(str(error), _type(error), code=_code(error))


def _type(error: ProxyError) -> str:
    return error.type if isinstance(error, Refusal | UpstreamError) else "upstream_error"


def _code(error: ProxyError) -> str | None:
    if isinstance(error, Refusal):
        return error.code
    return error.reason if isinstance(error, UpstreamError) else None
