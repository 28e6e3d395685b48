"""A keep-alive connection to an instance, which carries one HTTP exchange at a time.

`ConnectionPool` owns the connections; the flows use them through its `exchange`.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, cast

import httptools

from mooncake_proxy.errors import ConnectionLost, MalformedResponse, Rejected, UpstreamError
from mooncake_proxy.http1.http_wire import parse_fields, probe_peer

# A host of an instance that replies to nothing for this long is gone.
DEAD_HOST_S = 30


class Sink(Protocol):
    """Receives the body of a response as it arrives."""

    def feed(self, data: bytes) -> None:
        """Process the next bytes. Raising an UpstreamError here ends the exchange."""


@dataclass(slots=True)
class ClientLimits:
    """Timeouts in seconds, and the bound of idle connections, per instance. Bytes of a response
    that this process holds at once: of its head, and of a body that is not forwarded at once."""

    connect_timeout_s: float = 5.0
    # Until the response's head. Long, because P answers only after its prefill.
    first_byte_timeout_s: float = 600.0
    # Between two reads of a body.
    stall_timeout_s: float = 120.0
    max_idle: int = 256
    max_head_bytes: int = 256 * 1024
    max_held_bytes: int = 1024 * 1024 * 1024


@dataclass(slots=True)
class ClientContext:
    """What all connection pools share. `connections` are checked by `sweep_timeouts`."""

    limits: ClientLimits = field(default_factory=ClientLimits)
    connections: set[UpstreamConnection] = field(default_factory=set)
    # For https instances; if None, created with the first one.
    tls: ssl.SSLContext | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def tls_of(self, scheme: str) -> ssl.SSLContext | None:
        """The TLS context of a connection; None for http.

        All connections share it, because loading this host's CA certificates blocks the loop for
        30 ms.
        """
        if scheme != "https":
            return None
        if self.tls is None:
            self.tls = ssl.create_default_context()
        return self.tls


class ConnectionOwner(Protocol):
    """The pool to which a connection returns after an exchange."""

    @property
    def name(self) -> str:
        """The instance's name, for errors."""

    @property
    def context(self) -> ClientContext:
        """The context that all connections share."""

    def release(self, connection: UpstreamConnection) -> None:
        """Take a connection back after a successful exchange, for the next one."""

    def forget(self, connection: UpstreamConnection) -> None:
        """Forget a connection that the instance has closed."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to an instance; carries one exchange at a time.

    `with await pool.exchange(...) as answer:`, where leaving the block ends the exchange.
    """

    __slots__ = (
        "_context",
        "_failure",
        "_has_head",
        "_head",
        "_is_complete",
        "_is_hung_up",
        "_parser",
        "_parts",
        "_silence_limit_s",
        "_sink",
        "_time",
        "_transport",
        "_waiter",
        "_waits_for_body",
        "deadline",
        "name",
        "num_received",
        "owner",
        "reusable",
        "since",
        "status",
        "was_sent",
    )

    def __init__(self, owner: ConnectionOwner) -> None:
        self.owner = owner
        self._context = owner.context
        self._time = owner.context.loop.time
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._failure: UpstreamError | None = None
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        # Bytes received until the head was complete, maybe with the start of the body.
        self._head = b""
        self._has_head = False
        self._is_complete = True
        self._waits_for_body = False
        self._is_hung_up = False
        # Future of the task that waits for the head, the end of the body, or a failure.
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0
        self.num_received = 0
        self.was_sent = False
        self.reusable = True
        # Loop times: the deadline of the exchange, and the latest bytes received, after which the
        # instance may be silent for `_silence_limit_s`.
        self.deadline = 0.0
        self.since = 0.0
        self._silence_limit_s = 0.0
        self.name = owner.name

    def __enter__(self) -> UpstreamConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    # ------------------------------------------------ one exchange

    def send(
        self, payload: bytes, deadline: float, *, await_body: bool
    ) -> asyncio.Future[None] | None:
        """Start an exchange.

        Args:
            payload: bytes of the request.
            deadline: loop time at which the exchange fails.
            await_body: wait for the whole response instead of its head.

        Returns:
            A future that completes when the head or the whole response has arrived, or the exchange
            has failed; None if it has failed already. Unless `is_good` then, `check` raises why.
        """
        self._head = b""
        self._has_head = self._is_complete = self.reusable = False
        self.status = 0
        self._waits_for_body = await_body
        self.was_sent = True
        self.num_received = 0
        self.deadline = deadline
        self.since = self._time()
        self._silence_limit_s = self._context.limits.first_byte_timeout_s
        # uvloop raises on writes to a closing transport; other loops silently drop them.
        if self._transport is None or self._transport.is_closing():
            self._failure = ConnectionLost(self.name, "closed before the request was sent")
            self.was_sent = False
            return None
        self._transport.write(payload)
        self._waiter = self._context.loop.create_future()
        return self._waiter

    @property
    def is_good(self) -> bool:
        """Whether the awaited part of the response has arrived with status 200."""
        return self.status == 200 and self._failure is None

    async def check(self) -> None:
        """Raise the failure of the exchange, or `Rejected` with the instance's error response."""
        self._check_failure()
        if self.status != 200:
            raise Rejected(self.name, self.status, self.headers, await self.read())

    def _check_failure(self) -> None:
        if self._failure is not None and not self._is_complete:
            raise self._failure

    @property
    def is_busy(self) -> bool:
        """Whether an exchange is in flight."""
        return not self._is_complete and self._failure is None

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The response's headers by lower-case name. Parsed on access: most are never needed."""
        return parse_fields(self._head)

    @property
    def body(self) -> bytes:
        """The part of the body received so far; all of it if the whole response was awaited."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """Wait for the whole body."""
        while not self._is_complete:
            await self._more()
        return self.body

    async def forward(self, sink: Sink) -> None:
        """Feed the body to `sink` from within the read events, until it is complete.

        Waking a task per chunk would cost more than processing the chunk.
        """
        self._sink = sink
        if self._parts:
            self._flush(sink)
        while not self._is_complete:
            await self._more()

    def pause(self) -> None:
        """Stop reading, because the client is slower. The stall timeout is suspended."""
        # After a complete response there is nothing to pause, and the next exchange must read.
        if self._transport is not None and not self._is_complete:
            self._transport.pause_reading()
            self._silence_limit_s = math.inf

    def resume(self) -> None:
        """Continue to read."""
        if self._transport is not None:
            self._transport.resume_reading()
            self.since = self._time()
            self._silence_limit_s = self._context.limits.stall_timeout_s

    def finish(self) -> None:
        """End the exchange: return the connection to its pool, or close it.

        Closing it makes the instance abort the request.
        """
        self._sink = None
        if self._is_complete and self.reusable and self._transport and not self._is_hung_up:
            self._parts = []
            self.owner.release(self)
        else:
            self.close()

    def hang_up(self, wait_s: float) -> bool:
        """Half-close the connection, but keep reading for `wait_s` seconds.

        The instance sees EOF and aborts the request, unless its response is in flight already.

        Returns:
            False if half-close is not possible (TLS): then the connection is closed.
        """
        transport = self._transport
        if transport is None or not transport.can_write_eof():
            self.finish()
            return False
        self.deadline = self._time() + wait_s
        transport.write_eof()
        self._is_hung_up = True
        return True

    def close(self) -> None:
        """Close the connection immediately."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def fail(self, error: UpstreamError) -> None:
        """Fail the exchange with `error`, and close the connection."""
        if self._failure is None:
            self._failure = error
        self._wake()
        self.close()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _more(self) -> None:
        """Wait until the response is complete. Raises the exchange's failure."""
        self._waits_for_body = True
        if self.is_busy:
            self._waiter = self._context.loop.create_future()
            await self._waiter
        self._check_failure()

    def is_overdue(self, now: float) -> bool:
        """Whether the exchange has passed its deadline, or been silent for too long."""
        if not self.is_busy:
            return False
        return now > self.deadline or now - self.since > self._silence_limit_s

    def is_silent(self, since: float, unanswered_since: float) -> bool:
        """Whether the instance owes something, and has sent nothing for this exchange since the
        loop time `since`; since `unanswered_since`, if it has sent nothing for it at all."""
        is_awaited = self.is_busy and self._silence_limit_s < math.inf
        return is_awaited and self.since < (since if self.num_received else unanswered_since)

    # ------------------------------------------------ transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        # uvloop's transports have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self._context.connections.add(self)
        if (sock := transport.get_extra_info("socket")) is not None:
            probe_peer(sock, DEAD_HOST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """End or fail the exchange: the instance has closed the connection or died."""
        self._transport = None
        self._context.connections.discard(self)
        self.owner.forget(self)
        if not self.is_busy:
            return
        if exc is None and self._has_head and self._ends_with_connection():
            self.on_message_complete()
            self._wake()
            return
        detail = f"connection lost after {self.num_received} bytes of the answer"
        self.fail(ConnectionLost(self.name, detail if exc is None else f"{detail}: {exc}"))

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the instance, and feed the sink or wake the waiting task."""
        self.num_received += len(data)
        if not self._has_head:
            self._head = self._head + data if self._head else data
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not self._is_complete:
                self.fail(MalformedResponse(self.name, f"no HTTP answer: {exc}"))
                return
            self.reusable = False  # unexpected bytes after a complete response
            self.close()
        if not self._is_complete:
            self.since = self._time()
        sink = self._sink
        if sink is not None and self._parts:
            self._flush(sink)
        elif sink is None and not self._is_complete:
            self._check_held()
        if self._is_complete or (self._has_head and not self._waits_for_body):
            self._wake()

    def _check_held(self) -> None:
        """Fail the exchange if the part of its response that is held here is too large."""
        limits = self._context.limits
        part, limit = "answer", limits.max_held_bytes
        if not self._has_head:
            part, limit = "head of the answer", limits.max_head_bytes
        if self.num_received > limit:
            self.fail(MalformedResponse(self.name, f"the {part} is larger than {limit} bytes"))

    def _flush(self, sink: Sink) -> None:
        """Feed all body bytes of one network read to the sink, in one call."""
        parts, self._parts = self._parts, []
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        try:
            sink.feed(data)
        except UpstreamError as exc:
            self.reusable = False
            self._is_complete = False
            self.fail(exc)

    def _ends_with_connection(self) -> bool:
        """Whether the body has no length and ends with the connection (RFC 9112 §6.3)."""
        return not (self.headers.keys() & {b"content-length", b"transfer-encoding"})

    # ------------------------------------------------ parser events

    def on_message_begin(self) -> None:
        """Close the connection if a response begins without a request.

        Its rest would be mistaken for the response to the next request.
        """
        if self._is_complete:
            self.reusable = False
            self.close()

    def on_headers_complete(self) -> None:
        """Store the status; 1xx heads are skipped."""
        status = self._parser.get_status_code()
        if status < 200 or self._is_complete:
            return
        self.status = status
        self._has_head = True
        self._silence_limit_s = self._context.limits.stall_timeout_s

    def on_body(self, data: bytes) -> None:
        """Store a piece of the body."""
        if not self._is_complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """Note that the response is complete."""
        if not self._has_head or self._is_complete:
            return
        self.reusable = self._parser.should_keep_alive() and self._transport is not None
        self._is_complete = True
