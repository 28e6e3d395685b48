"""A keep-alive connection to an instance: one request and its response at a time."""

from __future__ import annotations

import asyncio
import math
import ssl
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, cast

import httptools

from mooncake_proxy.errors import ConnectionLost, MalformedAnswer, Rejected, UpstreamError
from mooncake_proxy.http1.http_wire import parse_fields


class Sink(Protocol):
    """Takes the body of an answer as it comes."""

    def feed(self, data: bytes) -> None:
        """The next bytes. An UpstreamError raised here ends the exchange."""


@dataclass(slots=True)
class ClientLimits:
    """Seconds and counts for connections to instances."""

    connect_timeout_s: float = 5.0
    # Until the head of an answer: P answers only after its prefill.
    first_byte_timeout_s: float = 600.0
    # Between two pieces of a body.
    stall_timeout_s: float = 120.0
    max_idle: int = 256


@dataclass(slots=True)
class ClientContext:
    """What all pools share. `connections` is what the time-out sweep looks at."""

    limits: ClientLimits = field(default_factory=ClientLimits)
    connections: set[UpstreamConnection] = field(default_factory=set)
    # Of https instances; made with the first one where none is given.
    tls: ssl.SSLContext | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def tls_of(self, scheme: str) -> ssl.SSLContext | None:
        """What a connection is secured by. Reading this host's authorities takes 30 ms, in which
        the loop does nothing else: one context serves all connections."""
        if scheme != "https":
            return None
        if self.tls is None:
            self.tls = ssl.create_default_context()
        return self.tls


class ConnectionOwner(Protocol):
    """The pool that a connection returns to between two exchanges."""

    @property
    def name(self) -> str:
        """The instance's name, for errors."""

    @property
    def context(self) -> ClientContext:
        """What all connections share."""

    def give_back(self, connection: UpstreamConnection) -> None:
        """An exchange ended well: the connection waits for the next one."""

    def forget(self, connection: UpstreamConnection) -> None:
        """The other side closed it."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to an instance; carries one exchange at a time.

    `with await pool.exchange(...) as answer:` — leaving the block ends the exchange.
    """

    __slots__ = (
        "_context",
        "_failure",
        "_has_head",
        "_head",
        "_is_complete",
        "_is_hung_up",
        "_owner",
        "_parser",
        "_parts",
        "_patience_s",
        "_sink",
        "_time",
        "_transport",
        "_waiter",
        "_waits_for_whole",
        "deadline",
        "name",
        "num_received",
        "reusable",
        "since",
        "status",
        "was_sent",
    )

    def __init__(self, home: ConnectionOwner) -> None:
        self._owner = home
        self._context = home.context
        self._time = home.context.loop.time
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._failure: UpstreamError | None = None
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        # What came until the head was whole, maybe with the beginning of the body.
        self._head = b""
        self._has_head = False
        self._is_complete = True
        self._waits_for_whole = False
        self._is_hung_up = False
        # Of the task that waits for the head, the end of the body, or a failure.
        self._waiter: asyncio.Future[None] | None = None
        self.status = 0
        self.num_received = 0
        self.was_sent = False
        self.reusable = True
        # Loop times: the end of the exchange whatever arrives, and the latest bytes, after
        # which silence may last for `_patience_s`.
        self.deadline = 0.0
        self.since = 0.0
        self._patience_s = 0.0
        self.name = home.name

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

    def send(self, payload: bytes, deadline: float, *, whole: bool) -> asyncio.Future[None] | None:
        """Start an exchange. `deadline` (loop time) bounds it whatever arrives.

        Returns what to await until the head of the answer is there, or the `whole` of it, or
        neither will ever be; None if that is now. Then, unless `is_good`, `check` raises why.
        """
        self._head = b""
        self._has_head = self._is_complete = self.reusable = False
        self.status = 0
        self._waits_for_whole = whole
        self.was_sent = True
        self.num_received = 0
        self.deadline = deadline
        self.since = self._time()
        self._patience_s = self._context.limits.first_byte_timeout_s
        # uvloop raises on writes to a transport that is closing; others drop them in silence.
        if self._transport is None or self._transport.is_closing():
            self._failure = ConnectionLost(self.name, "closed before the request was sent")
            self.was_sent = False
            return None
        self._transport.write(payload)
        self._waiter = self._context.loop.create_future()
        return self._waiter

    @property
    def is_good(self) -> bool:
        """True when what was awaited has come, with status 200."""
        return self.status == 200 and self._failure is None

    async def check(self) -> None:
        """Raise what ended the exchange, or the error that the instance answered, as it came."""
        self._check_failure()
        if self.status != 200:
            raise Rejected(self.name, self.status, self.headers, await self.read())

    def _check_failure(self) -> None:
        if self._failure is not None and not self._is_complete:
            raise self._failure

    @property
    def is_busy(self) -> bool:
        """True while an exchange runs."""
        return not self._is_complete and self._failure is None

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The answer's headers by lower-case name. Parsed when asked for: most never are."""
        return parse_fields(self._head)

    @property
    def body(self) -> bytes:
        """What has come of the body so far; the whole of it where that was awaited."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """The body, whole."""
        while not self._is_complete:
            await self._more()
        return self.body

    async def forward(self, sink: Sink) -> None:
        """Feed the body to `sink` from inside the read event; returns at its end.

        No task wakes up per chunk: that would cost more than the chunk itself.
        """
        self._sink = sink
        if self._parts:
            self._flush(sink)
        while not self._is_complete:
            await self._more()

    def pause(self) -> None:
        """Stop reading (the client is slower); the stall limit stops counting meanwhile."""
        # Of an answer that is whole nothing is left to hold back, and the next exchange reads here.
        if self._transport is not None and not self._is_complete:
            self._transport.pause_reading()
            self._patience_s = math.inf

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None:
            self._transport.resume_reading()
            self.since = self._time()
            self._patience_s = self._context.limits.stall_timeout_s

    def finish(self) -> None:
        """End the exchange: back to the pool, or closed, which aborts the request there."""
        self._sink = None
        if self._is_complete and self.reusable and self._transport and not self._is_hung_up:
            self._parts = []
            self._owner.give_back(self)
        else:
            self.close()

    def hang_up(self, wait_s: float) -> bool:
        """Half-close: tell the instance that the client is gone, but read for `wait_s` what is
        already on its way.

        The instance sees EOF and aborts what still runs. False where half-close does not exist
        (TLS): then the connection is closed.
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
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def fail(self, error: UpstreamError) -> None:
        """Make the exchange end with `error`."""
        if self._failure is None:
            self._failure = error
        self._wake()
        self.close()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _more(self) -> None:
        """Until the answer is complete, or failed."""
        self._waits_for_whole = True
        if self.is_busy:
            self._waiter = self._context.loop.create_future()
            await self._waiter
        self._check_failure()

    def is_overdue(self, now: float) -> bool:
        """Whether its exchange has lasted, or been silent, for too long."""
        if not self.is_busy:
            return False
        return now > self.deadline or now - self.since > self._patience_s

    # ------------------------------------------------ transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is open."""
        # uvloop's transports have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self._context.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The instance closed, or died."""
        self._transport = None
        self._context.connections.discard(self)
        self._owner.forget(self)
        if not self.is_busy:
            return
        if exc is None and self._has_head and self._ends_with_connection():
            self.on_message_complete()
            self._wake()
            return
        detail = f"connection lost after {self.num_received} bytes of the answer"
        self.fail(ConnectionLost(self.name, detail if exc is None else f"{detail}: {exc}"))

    def data_received(self, data: bytes) -> None:
        """Bytes from the instance."""
        self.num_received += len(data)
        if not self._has_head:
            self._head = self._head + data if self._head else data
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not self._is_complete:
                self.fail(MalformedAnswer(self.name, f"no HTTP answer: {exc}"))
                return
            self.reusable = False  # what nobody asked for, behind an answer that is whole
            self.close()
        if not self._is_complete:
            self.since = self._time()
        sink = self._sink
        if sink is not None and self._parts:
            self._flush(sink)
        if self._is_complete or (self._has_head and not self._waits_for_whole):
            self._wake()

    def _flush(self, sink: Sink) -> None:
        """All body bytes of one network read, in one piece."""
        parts, self._parts = self._parts, []
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        try:
            sink.feed(data)
        except UpstreamError as exc:
            self.reusable = False
            self._is_complete = False
            self.fail(exc)

    def _ends_with_connection(self) -> bool:
        """True for a body without length: closing ends it (RFC 9112 §6.3)."""
        return not (self.headers.keys() & {b"content-length", b"transfer-encoding"})

    # ------------------------------------------------ parser events

    def on_message_begin(self) -> None:
        """An answer begins. One without a request is nobody's: its rest would be taken for the next
        request's answer."""
        if self._is_complete:
            self.reusable = False
            self.close()

    def on_headers_complete(self) -> None:
        """The head is whole; 1xx heads are no answer yet."""
        status = self._parser.get_status_code()
        if status < 200 or self._is_complete:
            return
        self.status = status
        self._has_head = True
        self._patience_s = self._context.limits.stall_timeout_s

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if not self._is_complete:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if not self._has_head or self._is_complete:
            return
        self.reusable = self._parser.should_keep_alive() and self._transport is not None
        self._is_complete = True
