"""The instance side of the proxy: one keep-alive connection, one exchange at a time."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Protocol, cast

import httptools

from mooncake_proxy.errors import ConnectionLost, MalformedAnswer, UpstreamError


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
    """What all pools share. `busy` is what the time-out sweep looks at."""

    limits: ClientLimits = field(default_factory=ClientLimits)
    busy: set[Connection] = field(default_factory=set)
    tls: ssl.SSLContext | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)


class Home(Protocol):
    """Where a connection belongs between two exchanges."""

    @property
    def name(self) -> str:
        """The instance's name, for errors."""

    @property
    def context(self) -> ClientContext:
        """What all connections share."""

    def give_back(self, connection: Connection) -> None:
        """An exchange ended well: the connection waits for the next one."""

    def forget(self, connection: Connection) -> None:
        """The other side closed it."""


class Connection(asyncio.Protocol):
    """One connection to an instance; carries one exchange at a time."""

    __slots__ = (
        "_context",
        "_failure",
        "_has_head",
        "_headers",
        "_home",
        "_is_complete",
        "_is_head_wanted",
        "_is_hung_up",
        "_parser",
        "_parts",
        "_sink",
        "_transport",
        "_waiter",
        "deadline",
        "headers",
        "last_deadline",
        "name",
        "num_received",
        "reusable",
        "status",
    )

    def __init__(self, home: Home) -> None:
        self._home = home
        self._context = home.context
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure: UpstreamError | None = None
        self._sink: Sink | None = None
        self._parts: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._has_head = False
        self._is_complete = True
        self._is_head_wanted = False
        self._is_hung_up = False
        self.headers: dict[bytes, bytes] = {}
        self.status = 0
        self.num_received = 0
        self.reusable = True
        self.deadline = 0.0
        self.last_deadline = 0.0
        self.name = home.name

    # ------------------------------------------------ one exchange

    def send(self, payload: bytes, last_deadline: float) -> None:
        """Start an exchange. `last_deadline` (loop time) bounds it whatever arrives."""
        self._headers = {}
        self._parts = []
        self._sink = None
        self._has_head = False
        self._is_complete = False
        self.num_received = 0
        self.reusable = False
        self.last_deadline = last_deadline
        first = self._context.loop.time() + self._context.limits.first_byte_timeout_s
        self.deadline = first if first < last_deadline else last_deadline
        self._context.busy.add(self)
        # uvloop raises on writes to a transport that is closing; others drop them in silence.
        if self._transport is None or self._transport.is_closing():
            self._failure = ConnectionLost(self.name, "closed before the request was sent")
        else:
            self._transport.write(payload)

    def head_waiter(self) -> asyncio.Future[None] | None:
        """What to await until status and headers are there; None when they are, or never will be.

        `check` has to follow. A future instead of a coroutine: this runs twice per request.
        """
        if self._has_head or self._failure is not None:
            return None
        self._is_head_wanted = True
        self._waiter = self._context.loop.create_future()
        return self._waiter

    def check(self) -> None:
        """Raise what ended the exchange."""
        if self._failure is not None and not self._is_complete:
            raise self._failure

    async def read(self) -> bytes:
        """The rest of the body, whole."""
        while not self._is_complete:
            await self._wait()
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    async def relay(self, sink: Sink) -> None:
        """Feed the body to `sink` from inside the read event; returns at its end.

        No task wakes up per chunk: that would cost more than the chunk itself.
        """
        self._sink = sink
        if self._parts:
            self._flush(sink)
        while not self._is_complete:
            await self._wait()

    def pause(self) -> None:
        """Stop reading (the client is slower); the stall limit stops counting meanwhile."""
        if self._transport is not None:
            self._transport.pause_reading()
            self.deadline = self.last_deadline

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None:
            self._transport.resume_reading()
            self._touch()

    def finish(self) -> None:
        """End the exchange: back to the pool, or closed, which aborts the request there."""
        self._context.busy.discard(self)
        self._sink = None
        is_usable = self.reusable and self._transport is not None and not self._is_hung_up
        if self._is_complete and is_usable:
            self._parts = []
            self._home.give_back(self)
        else:
            self.close()

    def hang_up(self, wait_s: float) -> bool:
        """Say that nobody waits any more, but read what is already on its way, for `wait_s`.

        The instance sees the end of our side and aborts what still runs. False where that can't
        be said (TLS has no half-close): then the connection is closed.
        """
        transport = self._transport
        if transport is None or not transport.can_write_eof():
            self.finish()
            return False
        self.last_deadline = self.deadline = self._context.loop.time() + wait_s
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

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = self._context.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._failure is not None and not self._is_complete:
            raise self._failure

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _touch(self) -> None:
        stall = self._context.loop.time() + self._context.limits.stall_timeout_s
        self.deadline = stall if stall < self.last_deadline else self.last_deadline

    # ------------------------------------------------ transport events

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        # uvloop's transports have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The instance closed, or died."""
        self._transport = None
        self._home.forget(self)
        if self._is_complete:
            return
        if self._has_head and self._ends_with_connection():
            self.on_message_complete()
            return
        detail = f"connection lost after {self.num_received} bytes of the answer"
        self.fail(ConnectionLost(self.name, detail if exc is None else f"{detail}: {exc}"))

    def data_received(self, data: bytes) -> None:
        """Bytes from the instance."""
        self.num_received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.fail(MalformedAnswer(self.name, f"no HTTP answer: {exc}"))
            return
        sink = self._sink
        if sink is not None and self._parts:
            self._touch()
            self._flush(sink)
        if self._is_complete or (self._is_head_wanted and self._has_head):
            self._is_head_wanted = False
            self._wake()

    def _flush(self, sink: Sink) -> None:
        """All body bytes of one network read, in one piece."""
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        try:
            sink.feed(data)
        except UpstreamError as exc:
            self.reusable = False
            self._is_complete = False
            self.fail(exc)

    def _ends_with_connection(self) -> bool:
        """True for a body without length: HTTP says that closing ends it."""
        return not (self.headers.keys() & {b"content-length", b"transfer-encoding"})

    # ------------------------------------------------ parser events

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """The head is whole; 1xx heads are no answer yet."""
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        self.status = status
        self.headers = self._headers
        self._has_head = True
        self._touch()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        if not self._has_head:
            return
        if self._is_complete:
            self.close()  # an answer that nobody asked for
            return
        self.reusable = self._parser.should_keep_alive() and self._transport is not None
        self._is_complete = True
        self._wake()
