"""The client side of the proxy: one protocol object per connection, one `Exchange` per request."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import httptools

from mooncake_proxy.errors import Refusal
from mooncake_proxy.http1 import wire
from mooncake_proxy.http1.driver import Driver
from mooncake_proxy.openai import error_body

logger = logging.getLogger(__name__)


# No cache and no nginx in front may hold events back.
_STREAM_HEADERS = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"


class Pausable(Protocol):
    """What feeds an answer and can be told to wait."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Read again."""


@dataclass(slots=True)
class ServerLimits:
    """Bounds on what a client may send, in bytes and seconds."""

    max_body_bytes: int = 64 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_pipelined: int = 16
    head_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0


Handler = Callable[["Exchange"], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class ServerContext:
    """What all connections of a listener share."""

    handler: Handler
    limits: ServerLimits = field(default_factory=ServerLimits)
    connections: set[ServerProtocol] = field(default_factory=set)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_closing: bool = False


class Exchange:
    """One request and the answer to it.

    The handler answers with `respond` once, or with `start_stream`, `write`... and `end`. It is
    cancelled when the client goes away; writing to a client that is gone does nothing.
    """

    __slots__ = (
        "_protocol",
        "body",
        "bytes_out",
        "chunked",
        "ended",
        "headers",
        "keep_alive",
        "method",
        "source",
        "status",
        "target",
    )

    def __init__(self, protocol: ServerProtocol) -> None:
        self._protocol = protocol
        self.method = ""
        self.target = b""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.keep_alive = True
        self.chunked = True
        self.status = 0
        self.ended = False
        self.bytes_out = 0
        self.source: Pausable | None = None

    @property
    def path(self) -> str:
        """The target without its query, as latin-1 text."""
        return self.target.partition(b"?")[0].decode("latin-1")

    @property
    def query(self) -> str:
        """What follows the question mark."""
        return self.target.partition(b"?")[2].decode("latin-1")

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return self._protocol.peer

    @property
    def has_started(self) -> bool:
        """True once a status went out: from then on errors are events."""
        return self.status != 0

    def respond(self, status: int, body: bytes, content_type: str, headers: bytes = b"") -> None:
        """The whole answer at once."""
        self.status = status
        self._protocol.send(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n%b"
            % (
                wire.status_line(status),
                content_type.encode("latin-1"),
                len(body),
                headers,
                b"" if self.keep_alive else b"connection: close\r\n",
                b"" if self.method == "HEAD" else body,
            )
        )
        self.ended = True
        self.bytes_out += len(body)

    def start_stream(self, content_type: str, headers: bytes, first: bytes) -> None:
        """Status 200 and the first bytes of a body whose length is not known, in one write."""
        self.status = 200
        if not self.chunked:
            self.keep_alive = False
        self._protocol.send(
            b"%bcontent-type: %b\r\n%b%b%b%b\r\n%b"
            % (
                wire.STATUS_LINES[200],
                content_type.encode("latin-1"),
                _STREAM_HEADERS,
                b"transfer-encoding: chunked\r\n" if self.chunked else b"",
                headers,
                b"" if self.keep_alive else b"connection: close\r\n",
                (wire.chunk(first) if self.chunked else first) if first else b"",
            )
        )
        self.bytes_out += len(first)

    def write(self, data: bytes) -> None:
        """More of the stream; goes out at once."""
        self.bytes_out += len(data)
        self._protocol.send(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def end(self, last: bytes = b"") -> None:
        """The end of a stream, optionally with its last bytes."""
        self.bytes_out += len(last)
        if self.chunked:
            self._protocol.send((wire.chunk(last) if last else b"") + wire.LAST_CHUNK)
        elif last:
            self._protocol.send(last)
        self.ended = True

    def break_off(self) -> None:
        """Close the connection: the client must not take what it has for a whole answer."""
        self.keep_alive = False
        self._protocol.close()

    def attach(self, source: Pausable | None) -> None:
        """Let a slow client pause what feeds it."""
        self.source = source
        if source is not None and self._protocol.is_write_paused:
            source.pause()


class ServerProtocol(asyncio.Protocol):
    """Parses requests of one client connection and runs the handler for one after the other."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._incoming: Exchange | None = None
        self._parts: list[bytes] = []
        self._num_body_bytes = 0
        self._num_head_bytes = 0
        self._is_head_open = False
        self._waiting: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._driver: Driver | None = None
        self._is_refused = False
        self.is_write_paused = False
        self.since = 0.0
        self.peer = ""

    # ------------------------------------------------ transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport; uvloop sets TCP_NODELAY itself."""
        # uvloop's transports have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local"
        self.since = self._context.loop.time()
        self._context.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone: what runs for it is cancelled now, unless it has its answer."""
        self._context.connections.discard(self)
        self._transport = None
        self._waiting.clear()
        if self._driver is not None and self._current is not None and not self._current.ended:
            self._driver.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client; a request is handled as soon as it is whole."""
        if self._is_refused:
            return
        if self._incoming is None:
            self.since = self._context.loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "upgrade is not supported")
        except httptools.HttpParserError as exc:
            self._refuse(400, f"malformed HTTP request: {exc}")
        if self._is_head_open:
            self._bound_head(len(data))
        # Not from within the parser: the handler may answer and close at once.
        if self._waiting and self._current is None:
            self._start_next()

    def pause_writing(self) -> None:
        """The client reads slower than the instance writes: stop reading there."""
        self.is_write_paused = True
        if self._current is not None and self._current.source is not None:
            self._current.source.pause()

    def resume_writing(self) -> None:
        """The client caught up."""
        self.is_write_paused = False
        if self._current is not None and self._current.source is not None:
            self._current.source.resume()

    # ------------------------------------------------ parser events

    def on_message_begin(self) -> None:
        """A new request starts."""
        self._incoming = Exchange(self)
        self._parts = []
        self._num_body_bytes = 0
        self._num_head_bytes = 0
        self._is_head_open = True

    def on_url(self, url: bytes) -> None:
        """The target, maybe in pieces."""
        if self._incoming is not None:
            self._incoming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; a repeated one keeps its last value."""
        if self._incoming is not None:
            self._incoming.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is whole: refuse early what will be refused anyway."""
        exchange = self._incoming
        if exchange is None:
            return
        self._is_head_open = False
        exchange.method = self._parser.get_method().decode("ascii")
        exchange.keep_alive = self._parser.should_keep_alive() and not self._context.is_closing
        exchange.chunked = self._parser.get_http_version() != "1.0"
        headers = exchange.headers
        # The parser has seen to it that it is a number.
        num_bytes = int(headers.get(b"content-length", 0))
        if num_bytes > self._context.limits.max_body_bytes:
            self._refuse(413, f"body of {num_bytes} bytes: at most ")
        elif b"expect" in headers and headers[b"expect"].lower() == b"100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._context.limits.max_body_bytes:
            self._refuse(413, f"body of {self._num_body_bytes} bytes or more: at most ")
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """The request is whole: it runs when those before it are answered."""
        exchange = self._incoming
        if exchange is None or self._is_refused:
            return
        self._incoming = None
        parts = self._parts
        exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        self._waiting.append(exchange)
        if len(self._waiting) >= self._context.limits.max_pipelined and self._transport:
            self._transport.pause_reading()

    # ------------------------------------------------ running

    def _start_next(self) -> None:
        if self._current is not None or not self._waiting:
            return
        exchange = self._current = self._waiting.popleft()
        context = self._context
        self._driver = Driver(context.loop, context.handler(exchange), self._finish)
        self._driver.step()

    def _finish(self, error: BaseException | None) -> None:
        """The handler ended. It answers errors itself; what gets here is its own fault."""
        exchange = self._current
        assert exchange is not None
        if isinstance(error, Exception):
            logger.error("request handler failed", exc_info=error)
            self._own_up(exchange)
        self._driver = None
        self._current = None
        if self._transport is None:
            return
        if not (exchange.keep_alive and exchange.ended) or self._context.is_closing:
            self.close()
            return
        self.since = self._context.loop.time()
        if self._waiting:
            self._transport.resume_reading()
            self._context.loop.call_soon(self._start_next)

    def _own_up(self, exchange: Exchange) -> None:
        """Say that the fault is ours, or where the answer has begun break it off."""
        if exchange.has_started:
            exchange.break_off()
            return
        exchange.keep_alive = False
        message = "the proxy failed at this request; its log says how"
        body = error_body(message, Refusal.type, code=None, param=None)
        exchange.respond(Refusal.status, body, "application/json")

    # ------------------------------------------------ used by exchanges and the sweep

    def send(self, data: bytes) -> None:
        """Write now; nothing happens when the client is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close after what was written went out."""
        if self._transport is not None:
            self._transport.close()

    def cut_off(self, answer: Callable[[Exchange], None]) -> None:
        """Close now. A request that runs is cancelled, once `answer` has told its client."""
        exchange, driver = self._current, self._driver
        if exchange is not None and not exchange.ended:
            answer(exchange)
            if driver is not None:
                driver.cancel()
        self.close()

    @property
    def is_busy(self) -> bool:
        """True while a request runs."""
        return self._current is not None

    def sweep(self, now: float) -> None:
        """Close connections that dawdle over a request, or idle for too long."""
        if self._current is not None or self._transport is None:
            return
        limits = self._context.limits
        if self._incoming is None:
            if now - self.since > limits.idle_timeout_s:
                self.close()
        elif now - self.since > (limits.body_timeout_s if self._parts else limits.head_timeout_s):
            self._refuse(408, "the request did not arrive in time")

    def _bound_head(self, num_bytes: int) -> None:
        """A head that is not whole after this many bytes will not be waited for."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._context.limits.max_header_bytes:
            self._refuse(431, f"headers: at most {self._context.limits.max_header_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer a request that never becomes one, and close."""
        if self._is_refused:
            return
        self._is_refused = True
        self._waiting.clear()
        if status == 413:
            message += f"{self._context.limits.max_body_bytes} are accepted (--max-body-bytes)"
        exchange = self._incoming or Exchange(self)
        exchange.keep_alive = False
        if self._current is None:
            body = _refusal_body(status, message)
            exchange.respond(status, body, "application/json")
        self.close()


def _refusal_body(status: int, message: str) -> bytes:
    code = {413: "body_too_large", 431: "headers_too_large", 408: "timeout"}.get(status)
    return error_body(message, "invalid_request_error", code=code, param=None)
