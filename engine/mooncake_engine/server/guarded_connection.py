"""One HTTP connection of an instance: uvicorn's protocol with limits on each client's resources.

uvicorn limits neither the size of a request's head nor the time to receive a request, keeps
connections on which nothing was ever sent, and waits forever for clients that don't read. Each of
these holds a file descriptor or memory, and the instance needs both for KV.
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

logger = logging.getLogger(__name__)

WriteChunk = Callable[[bytes], bool]
WRITE_CHUNK = "mooncake.write_chunk"
"""Name of an ASGI extension, a ``WriteChunk``. It writes a chunk of a response's body, after the
start and before the end of the response, without a coroutine. It returns False, and writes nothing,
while writing is paused because the client reads too slowly."""

_WARN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the resources that clients may use; times in seconds.

    Args:
        connections: open connections of the server. Beyond this, each new connection closes the
            one that has been idle longest.
        head_bytes: bytes of a request's line and headers, and of everything else that is not body.
        fields: headers and trailers of one request.
        pipelined: requests of one connection that are queued behind a running one.
        head_s: time to receive a request's head, from the connection's start or the first byte.
        body_s: time to receive the whole body.
        stalled_s: time for which a client may read nothing of its response.
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
        """The limits for this process: connections use at most half of its file descriptors; KV
        transfer and files need the rest."""
        limits = cls()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return limits
        return replace(limits, connections=min(limits.connections, soft // 2))


class _BodyWriter:
    """The few fields of a connection that streaming needs. Each token of each stream loads them
    from memory, and a small object costs fewer cache misses than the whole connection.

    Args:
        flow: says whether writing is paused.
        transport: the connection's transport.
    """

    __slots__ = ("_flow", "_transport")

    def __init__(self, flow: FlowControl, transport: asyncio.Transport) -> None:
        self._flow = flow
        self._transport = transport

    def write_chunk(self, body: bytes) -> bool:
        """See ``WRITE_CHUNK``. Uses chunked encoding, as uvicorn does for responses without a
        length."""
        if self._flow.write_paused:
            return False
        transport = self._transport
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True


class GuardedConnection(HttpToolsProtocol):
    """A connection that enforces ``limits``, which all connections of a server share."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()
    _warned_at: ClassVar[float] = -_WARN_EVERY_S

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._idle_since: float | None = None
        self._num_fields = self._num_field_bytes = 0
        self._num_bytes = 0  # bytes received since the last head or body data
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a new connection. At the limit, it replaces the connection that has been idle
        longest; if none is idle, it is closed."""
        others = len(self.connections)
        super().connection_made(transport)
        if others >= self.limits.connections and not self._close_longest_idle():
            transport.abort()
            return
        self._idle_since = time.monotonic()
        self._set_read_timeout(self.limits.head_s, "the request's head")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of a closed connection."""
        self._set_read_timeout(None)
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and reject a request whose head is too large."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > self.limits.head_bytes:
            self._refuse("a head, trailers or chunk sizes that are too long")

    def on_message_begin(self) -> None:
        """Start the timeout of a request's head, and offer ``WRITE_CHUNK`` in its scope."""
        super().on_message_begin()
        write_chunk = _BodyWriter(self.flow, self.transport).write_chunk
        extensions: Any = {WRITE_CHUNK: write_chunk}  # ASGI types know only its own
        self.scope["extensions"] = extensions
        self._idle_since = None
        self._num_fields = self._num_field_bytes = 0
        self._set_read_timeout(self.limits.head_s, "the request's head")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or trailer against the limit."""
        self._num_fields += 1
        if self._num_fields > self.limits.fields:
            raise ValueError(f"more than {self.limits.fields} headers")
        # A head that arrives in one read is parsed before ``data_received`` sees its length.
        self._num_field_bytes += len(name) + len(value)
        if self._num_field_bytes > self.limits.head_bytes:
            raise ValueError(f"more than {self.limits.head_bytes} bytes of headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the timeout of the body once the head is complete."""
        if len(self.pipeline) >= self.limits.pipelined:
            raise ValueError(f"more than {self.limits.pipelined} requests at once")
        self._num_bytes = 0
        self._set_read_timeout(self.limits.body_s, "the request's body")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body, whose bytes don't count against ``head_bytes``."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the read timeout: the request has been received."""
        self._num_bytes = 0
        self._set_read_timeout(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Mark the connection as idle if no pipelined request is queued."""
        super().on_response_complete()
        if not self.pipeline:
            self._idle_since = time.monotonic()

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read its response."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop that timeout: the client reads again."""
        self._stop_write_timer()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._stop_write_timer()
        num_unread = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(
            self.limits.stalled_s, self._check_reader, num_unread
        )

    def _check_reader(self, num_unread: int) -> None:
        """Wait on for a client that reads, however slowly. Nothing is written meanwhile, so that
        its buffer only shrinks."""
        if self.transport.get_write_buffer_size() < num_unread:
            self._watch_reader()
        else:
            self._drop("the client does not read its response")

    def _close_longest_idle(self) -> bool:
        """Close the connection that has been idle longest; False if none is idle."""
        self._warn()
        idle = [
            other
            for other in cast("set[GuardedConnection]", self.connections)
            if other is not self and other._idle_since is not None
        ]
        if not idle:
            return False
        oldest = min(idle, key=lambda other: other._idle_since or 0.0)
        oldest._drop("idle longest when the connection limit was reached")
        return True

    def _warn(self) -> None:
        now = time.monotonic()
        if now - type(self)._warned_at >= _WARN_EVERY_S:
            type(self)._warned_at = now
            logger.warning(
                "the limit of %d connections is reached: each new connection closes the one that "
                "has been idle longest, and is refused if none is idle",
                self.limits.connections,
            )

    def _set_read_timeout(self, within_s: float | None, what: str = "") -> None:
        """Restart the read timeout: the client has ``within_s`` seconds to send ``what``. None
        stops the timeout."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        if within_s is not None:
            self._read_timer = self.loop.call_later(
                within_s, self._drop, f"timeout while receiving {what}"
            )

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _drop(self, reason: str) -> None:
        logger.debug("closing the connection of %s: %s", self.client, reason)
        self.connections.discard(self)
        self.transport.abort()

    def _refuse(self, reason: str) -> None:
        if not self.transport.is_closing():
            logger.debug("refusing the request of %s: %s", self.client, reason)
            self.send_400_response("Invalid HTTP request received.")
