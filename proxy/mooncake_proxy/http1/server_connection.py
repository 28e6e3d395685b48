"""The HTTP server of the proxy: one protocol object per client connection, one task per request.

`ServerProtocol` parses requests, bounds what clients can make the proxy hold, and runs the
application's handler.
"""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import sys
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from typing import Any, cast

import httptools

from mooncake_proxy.api.openai_bodies import error_body
from mooncake_proxy.errors import INTERNAL_ERROR, Refusal
from mooncake_proxy.http1.cross_origin import CrossOriginPolicy
from mooncake_proxy.http1.http_request import HttpRequest

logger = logging.getLogger(__name__)
# Each request is a task. From Python 3.12 on it starts eagerly, not in the loop's next iteration.
# Compared with coroutines driven directly by read events, tasks cost 4 % more CPU per request at 16
# connections, 1 % at 64 and 1 % per streamed token (Python 3.11; 3 % at 16 with 3.13).
_new_task: Callable[..., asyncio.Task[None]] = asyncio.Task
if sys.version_info >= (3, 12):
    _new_task = partial(asyncio.Task, eager_start=True)

_MAX_CONNECTIONS = 65_536
_ORIGIN = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)


@dataclass(slots=True)
class ServerLimits:
    """Limits on what a client may send: bytes, counts and timeouts in seconds."""

    max_body_bytes: int = 64 * 1024 * 1024
    # For all connections together: bodies that are incomplete, or whose request is queued. Beyond
    # it the connection that holds most is refused.
    max_held_bytes: int = 1024 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_headers: int = 200
    max_pipelined: int = 16
    head_timeout_s: float = 20.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    # A client that reads nothing of its response for this long is disconnected.
    write_timeout_s: float = 120.0
    # To write the rest, or to read and discard what the client still sends, at a close.
    close_timeout_s: float = 5.0


Handler = Callable[[HttpRequest], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class ServerContext:
    """State that all connections of a listener share."""

    handler: Handler
    limits: ServerLimits = field(default_factory=ServerLimits)
    # Largest body of a request, by its head; 0: the request is answered without reading its body.
    body_limit: Callable[[HttpRequest], int] | None = None
    # None: web pages of other origins can't read responses.
    cross_origin: CrossOriginPolicy | None = None
    connections: set[ServerProtocol] = field(default_factory=set)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    is_closing: bool = False
    num_held_bytes: int = 0
    # Open connections, of all listeners that share `connections`: at most half of the descriptors,
    # as connections to instances need the rest.
    max_connections: int = field(default_factory=lambda: _max_connections())

    def largest_holder(self) -> ServerProtocol:
        """The connection that holds most, of the client host that does: one that opens many
        connections must not push out the others' by their size."""
        holders = [each for each in self.connections if each.context is self]
        by_host: Counter[str] = Counter()
        for each in holders:
            by_host[each.host] += each.num_held_bytes
        [(worst, _)] = by_host.most_common(1)
        of_worst = (each for each in holders if each.host == worst)
        return max(of_worst, key=lambda each: each.num_held_bytes)

    def make_room(self) -> bool:
        """Close the connections that have been without a running request longest; False if there
        are none. Many at once, so that a flood of connections costs little time."""
        unused = [each for each in self.connections if not each.is_busy]
        num_closed = 1 + self.max_connections // 16
        for each in nsmallest(num_closed, unused, key=lambda each: each.since):
            each.abort()
        return bool(unused)


def _max_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft // 2, _MAX_CONNECTIONS)


class ServerProtocol(asyncio.Protocol):
    """Parses the requests of one client connection, and runs the handler for one at a time."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self._time = context.loop.time
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._incoming: HttpRequest | None = None
        self._body: bytes | bytearray = b""
        self._num_body_bytes = 0
        self._max_body_bytes = 0
        # This connection's share of `ServerContext.num_held_bytes`.
        self.num_held_bytes = 0
        self._num_head_bytes = 0
        self._has_two_hosts = False
        self._is_head_open = False
        # The latest read: its number of bytes, and whether all of them belong to one message.
        self._num_read_bytes = 0
        self._is_one_message = True
        # Bytes since the latest piece of a body, that is chunk extensions and trailers.
        self._num_overhead_bytes = 0
        self._wants_continue = False
        self._waiting: deque[HttpRequest] = deque()
        self._current: HttpRequest | None = None
        self._task: asyncio.Task[None] | None = None
        # Nothing more is processed from this client.
        self._is_refused = False
        self._closing_since: float | None = None
        self._write_paused_since = 0.0
        # Size of the write buffer at the latest sweep.
        self._num_left = 0
        self._is_read_paused = False
        self.is_write_paused = False
        self.since = 0.0
        self.peer = self.host = ""

    # ------------------------------------------------ transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. uvloop sets TCP_NODELAY itself. At the limit of connections, one
        without a running request is closed for it; if there is none, it is closed itself."""
        # uvloop's transports have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if isinstance(peer, tuple) else "local"
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local"
        self.since = self._time()
        context = self.context
        if len(context.connections) >= context.max_connections and not context.make_room():
            self._transport.abort()
            return
        context.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the running request, unless it is answered: the client has disconnected."""
        self.context.connections.discard(self)
        self._transport = None
        self._drop_bodies()
        if self._task is not None and self._current is not None and not self._current.ended:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client. A request is handled as soon as it is complete."""
        if self._is_refused:
            return
        is_first = self._incoming is None
        if is_first:
            self.since = self._time()
        was_head_open, num_body_bytes = self._is_head_open, self._num_body_bytes
        self._is_one_message = True
        self._num_read_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._ignore_upgrade(data[exc.args[0] :])
        except httptools.HttpParserError as exc:
            self._refuse(400, f"malformed HTTP request: {exc}")
        if self._incoming is not None and self._is_one_message:
            self._bound_overhead(len(data), was_head_open or is_first, num_body_bytes)
        # Not from within the parser: the handler may answer and close immediately.
        if self._waiting and self._current is None:
            self._start_next()

    def pause_writing(self) -> None:
        """Pause the source of the response: the client reads more slowly than it is fed."""
        self.is_write_paused = True
        self._write_paused_since = self._time()
        if self._current is not None and self._current.source is not None:
            self._current.source.pause()

    def resume_writing(self) -> None:
        """Resume the source: the client has caught up."""
        self.is_write_paused = False
        if self._current is not None and self._current.source is not None:
            self._current.source.resume()
        elif self._current is None:
            self._start_next()

    # ------------------------------------------------ parser events

    def on_message_begin(self) -> None:
        """Start a new request."""
        self._incoming = HttpRequest(self)
        self._body = b""
        self._num_body_bytes = 0
        self._num_head_bytes = 0
        self._has_two_hosts = False
        self._num_overhead_bytes = 0
        self._wants_continue = False
        self._is_head_open = True

    def on_url(self, url: bytes) -> None:
        """Append to the target, which may arrive in pieces."""
        if self._incoming is not None:
            self._incoming.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; of a repeated one the last value. Trailers are dropped."""
        request = self._incoming
        if request is not None and self._is_head_open:
            name, headers = name.lower(), request.headers
            if name == b"host" and name in headers:
                self._has_two_hosts = True
            headers[name] = value

    def on_headers_complete(self) -> None:
        """Validate the head, and refuse early what would be refused later anyway."""
        request = self._incoming
        if request is None:
            return
        self._is_head_open = False
        parser, context = self._parser, self.context
        method = parser.get_method()
        if parser.should_upgrade() and method != b"CONNECT":
            return  # `_ignore_upgrade` parses the head again, without the upgrade
        request.method = method.decode("ascii")
        request.keep_alive = parser.should_keep_alive() and not context.is_closing
        request.chunked = parser.get_http_version() != "1.0"
        if not request.target.startswith(b"/"):
            # as to a forward proxy, which a server has to accept (RFC 9112 §3.2.2)
            request.target = _ORIGIN.sub(b"", request.target) or b"/"
        headers, limits = request.headers, context.limits
        if len(headers) > limits.max_headers:
            self._refuse(431, f"{len(headers)} headers: at most {limits.max_headers}")
        elif self._num_read_bytes > limits.max_header_bytes < _size_of_head(request):
            self._refuse(431, f"headers: at most {limits.max_header_bytes} bytes")
        elif request.chunked and (self._has_two_hosts or b"host" not in headers):
            self._refuse(400, "wanted one Host header")
        else:
            self._expect_body(request, headers)

    def _expect_body(self, request: HttpRequest, headers: dict[bytes, bytes]) -> None:
        if self.context.cross_origin is not None and b"origin" in headers:
            policy, origin = self.context.cross_origin, headers[b"origin"]
            request.cross_origin_headers = policy.response_headers(origin)
        # The parser has checked that the value is a number.
        num_bytes = int(headers.get(b"content-length", 0))
        limit_of, limits = self.context.body_limit, self.context.limits
        self._max_body_bytes = limits.max_body_bytes if limit_of is None else limit_of(request)
        if self._max_body_bytes == 0 and (num_bytes or b"transfer-encoding" in headers):
            request.keep_alive = False
            self.on_message_complete()
            self._is_refused = True
        elif num_bytes > self._max_body_bytes:
            self._refuse(413, f"body of {num_bytes} bytes: at most ")
        elif b"expect" in headers and headers[b"expect"].lower() == b"100-continue":
            self._wants_continue = True
            self._invite_body()

    def _invite_body(self) -> None:
        """Send 100 Continue, once no earlier response can be mixed up with it."""
        if self._wants_continue and self._current is None and not self._waiting:
            self._wants_continue = False
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Store a piece of the body, and refuse the request if it is too large."""
        if self._is_refused:
            return
        context, num_bytes = self.context, len(data)
        self._num_body_bytes += num_bytes
        self.num_held_bytes += num_bytes
        context.num_held_bytes += num_bytes
        if self._num_body_bytes > self._max_body_bytes:
            self._refuse(413, f"body of {self._num_body_bytes} bytes or more: at most ")
            return
        max_held_bytes = max(context.limits.max_held_bytes, self._max_body_bytes)
        while context.num_held_bytes > max_held_bytes:
            context.largest_holder().refuse_held()
        if self._is_refused:
            return
        if not self._body:
            self._body = data  # nearly always the whole body
        else:  # one buffer: a list of 2-byte pieces would take twenty times their size
            gathered = self._body if isinstance(self._body, bytearray) else bytearray(self._body)
            gathered += data
            self._body = gathered

    def on_message_complete(self) -> None:
        """Queue the complete request; it runs when those before it have been answered."""
        request = self._incoming
        if request is None or self._is_refused or not request.method:
            return
        self._incoming = None
        self._is_one_message = False
        self._wants_continue = False
        request.body = bytes(self._body)
        self._body = b""
        self._waiting.append(request)
        is_full = len(self._waiting) >= self.context.limits.max_pipelined
        if is_full and not self._is_read_paused and self._transport:
            self._is_read_paused = True
            self._transport.pause_reading()

    # ------------------------------------------------ running

    def _start_next(self) -> None:
        if self._current is not None or not self._waiting or self.is_write_paused:
            return
        request = self._current = self._waiting.popleft()
        num_bytes = len(request.body)
        self.num_held_bytes -= num_bytes
        self.context.num_held_bytes -= num_bytes
        self._task = _new_task(self._run(request), loop=self.context.loop, name="request")

    async def _run(self, request: HttpRequest) -> None:
        """Run a request's task. The handler answers errors itself; one that escapes is a bug."""
        try:
            await self.context.handler(request)
        except Exception:
            logger.exception("request handler failed")
            self._answer_internal_error(request)
        finally:
            self._finish(request)

    def _finish(self, request: HttpRequest) -> None:
        """Start the next request of this connection, or close it."""
        self._task = None
        self._current = None
        if self._transport is None:
            return
        if not (request.keep_alive and request.ended) or self.context.is_closing:
            self.close()
            return
        self.since = self._time()
        if self._wants_continue:
            self._invite_body()
        if self._is_read_paused and len(self._waiting) < self.context.limits.max_pipelined:
            self._is_read_paused = False
            self._transport.resume_reading()
        if self._waiting:
            self.context.loop.call_soon(self._start_next)

    def _answer_internal_error(self, request: HttpRequest) -> None:
        """Answer 500, or close the connection if the response has started."""
        if request.has_started:
            request.break_off()
            return
        request.keep_alive = False
        body = error_body(INTERNAL_ERROR, Refusal.type, code=None, param=None)
        request.respond(Refusal.status, body, "application/json")

    # ------------------------------------------------ used by exchanges and the sweep

    def send(self, data: bytes) -> None:
        """Write immediately; ignored if the client has disconnected."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def close(self) -> None:
        """Close once the write buffer is flushed; `sweep` aborts if that takes too long."""
        transport = self._transport
        if transport is None or self._closing_since is not None:
            return
        self._closing_since = self._time()
        if self._is_refused and transport.can_write_eof():
            if self._is_read_paused:
                transport.resume_reading()
            transport.write_eof()  # a close with unread bytes would reset the connection
        else:
            transport.close()

    def cut_off(self, answer: Callable[[HttpRequest], None]) -> None:
        """Close the connection. A running request is answered by `answer`, then cancelled."""
        request, task = self._current, self._task
        if request is not None and not request.ended:
            answer(request)
            if task is not None:
                task.cancel()
        self.close()

    @property
    def is_busy(self) -> bool:
        """Whether a request is running, or the client has yet to read a part of its response."""
        transport = self._transport
        has_unsent = transport is not None and transport.get_write_buffer_size() > 0
        return self._current is not None or has_unsent

    def sweep(self, now: float) -> None:
        """Close the connection if the client sends or reads too slowly, or is idle too long."""
        limits, transport = self.context.limits, self._transport
        if transport is None:
            return
        if self._closing_since is not None or self.is_write_paused:
            is_closing = self._closing_since is not None
            limit_s = limits.close_timeout_s if is_closing else limits.write_timeout_s
            if self._silent_for(now, transport) > limit_s:
                transport.abort()
        elif self._current is None:
            self._sweep_idle(now, limits)

    def postpone_timeouts(self, stopped_s: float) -> None:
        """Don't count the last `stopped_s` seconds: this process could neither read nor write."""
        self.since += stopped_s
        self._write_paused_since += stopped_s
        if self._closing_since is not None:
            self._closing_since += stopped_s

    def _silent_for(self, now: float, transport: asyncio.Transport) -> float:
        """Seconds for which the client has read nothing of what was written to it."""
        num_left = transport.get_write_buffer_size()
        if num_left < self._num_left:
            self._write_paused_since = now
        self._num_left = num_left
        return now - max(self._write_paused_since, self._closing_since or 0.0)

    def _sweep_idle(self, now: float, limits: ServerLimits) -> None:
        if self._incoming is None:
            if now - self.since > limits.idle_timeout_s:
                self.close()
        elif now - self.since > (limits.body_timeout_s if self._body else limits.head_timeout_s):
            self._refuse(408, "the request did not arrive in time")

    def _bound_overhead(self, num_bytes: int, was_head_open: bool, num_body_bytes: int) -> None:
        """Refuse endless heads, chunk extensions and trailers, whose bytes the parser buffers.

        Counts the reads within one message that contain nothing of its body.
        """
        max_bytes = self.context.limits.max_header_bytes
        if self._is_head_open:
            self._num_head_bytes += num_bytes
            if self._num_head_bytes > max_bytes:
                self._refuse(431, f"headers: at most {max_bytes} bytes")
        elif not was_head_open and self._num_body_bytes == num_body_bytes:
            self._num_overhead_bytes += num_bytes
            if self._num_overhead_bytes > max_bytes:
                self._refuse(431, f"trailers: at most {max_bytes} bytes")
        else:
            self._num_overhead_bytes = 0

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Process a request that offers a protocol upgrade as if it did not (RFC 9110 §7.8).

        The parser has skipped its body, so its head is parsed again without the offer.
        """
        request = self._incoming
        if (
            request is None
            or self._waiting
            or self._current
            or self._parser.get_method() == b"CONNECT"
        ):
            self._refuse(400, "upgrade is not supported")
            return
        kept = {name: value for name, value in request.headers.items() if name != b"upgrade"}
        tokens = [token.strip() for token in kept.pop(b"connection", b"").lower().split(b",")]
        if b"close" in tokens:
            kept[b"connection"] = b"close"
        lines = [b"%b: %b\r\n" % item for item in kept.items()]
        version = self._parser.get_http_version().encode("ascii")
        line = b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), request.target, version)
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(b"%b%b\r\n" % (line, b"".join(lines)))
            self._parser.feed_data(rest)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "upgrade is not supported")
        except httptools.HttpParserError as exc:
            self._refuse(400, f"malformed HTTP request: {exc}")

    def _drop_bodies(self) -> None:
        """Drop the bodies of requests that will not run."""
        self._waiting.clear()
        self._body = b""
        self.context.num_held_bytes -= self.num_held_bytes
        self.num_held_bytes = 0

    def refuse_held(self) -> None:
        """Refuse the request whose body is incomplete, and drop those that are queued."""
        if self._is_refused:  # what the client sends is no longer read, but requests are queued
            self.abort()
        else:
            self._refuse(503, "too many request bodies are in flight: try again later")

    def abort(self) -> None:
        """Close the connection at once, and hold nothing for it from now on."""
        self._is_refused = True
        self._drop_bodies()
        self.context.connections.discard(self)
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Refuse an invalid or incomplete request, and close the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        self._drop_bodies()
        if status == 413:
            message += f"{self._max_body_bytes} are accepted (--max-body-bytes)"
        request = self._incoming or HttpRequest(self)
        request.keep_alive = False
        if self._current is None:
            code = {413: "body_too_large", 431: "headers_too_large", 408: "timeout"}.get(status)
            kind = "invalid_request_error" if status < 500 else "service_unavailable"
            body = error_body(message, kind, code=code, param=None)
            request.respond(status, body, "application/json")
        self.close()


def _size_of_head(request: HttpRequest) -> int:
    """Bytes of the target and the stored headers."""
    fields = request.headers
    return len(request.target) + sum(map(len, fields)) + sum(map(len, fields.values()))
