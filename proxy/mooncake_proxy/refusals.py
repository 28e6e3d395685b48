"""What a client gets to see of an error: the true status, or an event in a running stream."""

from __future__ import annotations

from mooncake_proxy import openai
from mooncake_proxy.errors import FailedStream, ProxyError, Refusal, Rejected, UpstreamError
from mooncake_proxy.http1.server import Exchange
from mooncake_proxy.http1.wire import header_lines


def answer_error(exchange: Exchange, error: ProxyError, headers: bytes) -> None:
    """The true status where none was sent yet, an SSE error event afterwards."""
    if exchange.ended:
        return
    if exchange.has_started:
        exchange.end(_error_event(error))
        return
    if isinstance(error, Rejected):
        kept = (
            (name.decode("latin-1"), error.headers[name].decode("latin-1"))
            for name in (b"retry-after", b"www-authenticate")
            if name in error.headers
        )
        kind = error.headers.get(b"content-type", b"application/json").decode("latin-1")
        exchange.respond(error.status, error.body, kind, headers + header_lines(kept))
    elif isinstance(error, FailedStream):
        body = b'{"error":%b}' % error.error
        exchange.respond(error.status, body, "application/json", headers)
    elif isinstance(error, Refusal):
        body = openai.error_body(error.message, error.type, code=error.code, param=error.param)
        exchange.respond(
            error.status, body, "application/json", headers + header_lines(error.headers)
        )
    else:
        status = error.status if isinstance(error, UpstreamError) else 500
        body = openai.error_body(str(error), _type(error), code=_code(error), param=None)
        exchange.respond(status, body, "application/json", headers)


def _error_event(error: ProxyError) -> bytes:
    if isinstance(error, FailedStream):
        return error.event
    return openai.error_event(str(error), _type(error), code=_code(error))


def _type(error: ProxyError) -> str:
    return error.type if isinstance(error, Refusal | UpstreamError) else "upstream_error"


def _code(error: ProxyError) -> str | None:
    if isinstance(error, Refusal):
        return error.code
    return error.reason if isinstance(error, UpstreamError) else None
