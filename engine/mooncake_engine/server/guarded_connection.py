"""One HTTP connection of an instance: uvicorn's, with bounds on what its client may cost.

uvicorn bounds neither the head of a request nor the time that it takes, keeps connections on which
nothing was ever sent, and waits for ever for clients that don't read. Each of these holds a
descriptor or memory, and the instance needs both for KV.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

WriteChunk = Callable[[bytes], bool]
WRITE_CHUNK = "mooncake.write_chunk"
"""Name of an ASGI extension, a ``WriteChunk``: it writes bytes of a response's body between its
start and its end without a coroutine, or returns False where the client takes no more for now."""

_WARN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one client may cost the server; times in seconds.

    Args:
        connections: at once. Beyond that the longest idle one is closed for a new one.
        head_bytes: of a request's line and headers, and of what else is no body.
        fields: headers and trailers of one request.
        pipelined: requests that wait behind a running one.
        head_s: from a connection's start, or a head's first byte, to its end.
        body_s: for the whole body.
        stalled_s: how long a client may take nothing of its response.
    """

    connections: int = 8192
    head_bytes: int = 64 << 10
    fields: int = 256
    pipelined: int = 16
    head_s: float = 15.0
    body_s: float = 120.0
    stalled_s: float = 60.0

    @classmethod
    def for_process(cls) -> ConnectionLimits:
        """Those of this process: half of its descriptors are left to KV and files."""
        limits = cls()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return limits
        return replace(limits, connections=min(limits.connections, soft // 2))


class _BodyWriter:
    """What streaming needs of a connection, which has much more: each token of each stream reads it
    anew from memory.

    Args:
        flow: whether its client takes more.
        transport: its socket.
    """

    __slots__ = ("_flow", "_transport")

    def __init__(self, flow: FlowControl, transport: asyncio.Transport) -> None:
        self._flow = flow
        self._transport = transport

    def write_chunk(self, body: bytes) -> bool:
        """See ``WRITE_CHUNK``. Responses without a length are chunked, as uvicorn's are."""
        if self._flow.write_paused:
            return False
        transport = self._transport
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True


class GuardedConnection(HttpToolsProtocol):
    """A connection within ``limits``, which are the same for all of a server."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    _warned_at: ClassVar[float] = -_WARN_EVERY_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle_since: float | None = None
        self._num_fields = 0
        self._num_bytes = 0  # since the last request or piece of a body
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it is let in, maybe in the place of an idle one."""
        others = len(self.connections)
        super().connection_made(transport)
        if others >= self.limits.connections and not self._take_place():
            transport.abort()
            return
        self._idle_since = time.monotonic()
        self._expect(self.limits.head_s, "its request's head")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._expect(None)
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, within the limits."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > self.limits.head_bytes:
            self._refuse("a head, trailers or chunk sizes that are too long")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        write_chunk = _BodyWriter(self.flow, self.transport).write_chunk
        extensions: Any = {WRITE_CHUNK: write_chunk}  # ASGI types hold none but its own
        self.scope["extensions"] = extensions
        self._idle_since = None
        self._num_fields = 0
        self._expect(self.limits.head_s, "its request's head")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or trailer."""
        self._num_fields += 1
        if self._num_fields > self.limits.fields:
            raise ValueError(f"more than {self.limits.fields} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is whole; its body may follow."""
        if len(self.pipeline) >= self.limits.pipelined:
            raise ValueError(f"more than {self.limits.pipelined} requests at once")
        self._num_bytes = 0
        self._expect(self.limits.body_s, "its request's body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._num_bytes = 0
        self._expect(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A response is whole; the next request may come later."""
        super().on_response_complete()
        if not self.pipeline:
            self._idle_since = time.monotonic()

    def pause_writing(self) -> None:
        """The client takes nothing at the moment."""
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(
            self.limits.stalled_s, self._drop, "it takes nothing of its response"
        )

    def resume_writing(self) -> None:
        """It does again."""
        self._stop_write_timer()
        super().resume_writing()

    def _take_place(self) -> bool:
        """Close the connection that is idle for longest; False if none is."""
        self._warn()
        idle = [
            other
            for other in cast("set[GuardedConnection]", self.connections)
            if other is not self and other._idle_since is not None
        ]
        if not idle:
            return False
        oldest = min(idle, key=lambda other: other._idle_since or 0.0)
        oldest._drop("it is idle, and others wait")
        return True

    def _warn(self) -> None:
        now = time.monotonic()
        if now - type(self)._warned_at >= _WARN_EVERY_S:
            type(self)._warned_at = now
            log.warning(
                "%d connections are open, which is the limit: the longest idle ones are closed for "
                "new ones, which are refused if none is idle",
                self.limits.connections,
            )

    def _expect(self, within_s: float | None, what: str = "") -> None:
        """The client has that long for what it sends next; None: for as long as it likes."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        if within_s is not None:
            self._read_timer = self.loop.call_later(within_s, self._drop, f"it is late with {what}")

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _drop(self, reason: str) -> None:
        log.debug("closing the connection of %s: %s", self.client, reason)
        self.connections.discard(self)
        self.transport.abort()

    def _refuse(self, reason: str) -> None:
        if not self.transport.is_closing():
            log.debug("refusing the request of %s: %s", self.client, reason)
            self.send_400_response("Invalid HTTP request received.")
