"""A client's HTTP request and the response to it, as handlers see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mooncake_proxy.http1.http_wire import LAST_CHUNK, STATUS_LINES, chunk, status_line

if TYPE_CHECKING:
    from mooncake_proxy.http1.server_connection import ServerProtocol

# Keep caches and nginx from buffering events.
_STREAM_HEADERS = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"


class Pausable(Protocol):
    """The source of a response body, which can be paused."""

    def pause(self) -> None:
        """Stop reading."""

    def resume(self) -> None:
        """Continue to read."""


class AnswerTranslation(Protocol):
    """Translates OpenAI answers to the API format of the client."""

    def complete(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Translate a complete answer or an error."""

    def events(self, data: bytes) -> bytes:
        """Translate the next bytes of a stream."""


class HttpRequest:
    """One request and its response. `ServerProtocol` creates it and runs its handler.

    The handler answers with a single `respond`, or with `start_stream`, any number of `write`, and
    `end`. It is cancelled when the client disconnects; writes after that are ignored.
    """

    __slots__ = (
        "_protocol",
        "body",
        "bytes_out",
        "chunked",
        "cross_origin_headers",
        "ended",
        "headers",
        "is_admin",
        "keep_alive",
        "method",
        "source",
        "status",
        "target",
        "translation",
    )

    def __init__(self, protocol: ServerProtocol) -> None:
        self._protocol = protocol
        self.method = ""
        self.target = b""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.keep_alive = True
        self.chunked = True
        # The request came to the admin port.
        self.is_admin = False
        self.status = 0
        self.ended = False
        self.bytes_out = 0
        self.source: Pausable | None = None
        # Header lines for the browser of a page of another origin.
        self.cross_origin_headers = b""
        # Applied to everything that is sent to the client.
        self.translation: AnswerTranslation | None = None

    @property
    def path(self) -> str:
        """The target without its query, as latin-1 text."""
        return self.target.partition(b"?")[0].decode("latin-1")

    @property
    def query(self) -> str:
        """The query of the target, without the question mark."""
        return self.target.partition(b"?")[2].decode("latin-1")

    @property
    def peer(self) -> str:
        """The client's address, for logs."""
        return self._protocol.peer

    @property
    def has_started(self) -> bool:
        """Whether a status has been sent. From then on errors can only be sent as events."""
        return self.status != 0

    def respond(self, status: int, body: bytes, content_type: str, headers: bytes = b"") -> None:
        """Send the whole response."""
        if self.translation is not None:
            status, body = self.translation.complete(status, body)
        self.status = status
        self._protocol.send(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b%b\r\n%b"
            % (
                status_line(status),
                content_type.encode("latin-1"),
                len(body),
                headers,
                self.cross_origin_headers,
                self._connection_line(),
                b"" if self.method == "HEAD" else body,
            )
        )
        self.ended = True
        self.bytes_out += len(body)

    def start_stream(self, content_type: str, headers: bytes, first: bytes) -> None:
        """Send status 200 and the first bytes of a body of unknown length, in one write."""
        self.status = 200
        if not self.chunked:
            self.keep_alive = False
        if self.translation is not None:
            first = self.translation.events(first)
        self._protocol.send(
            b"%bcontent-type: %b\r\n%b%b%b%b%b\r\n%b"
            % (
                STATUS_LINES[200],
                content_type.encode("latin-1"),
                _STREAM_HEADERS,
                b"transfer-encoding: chunked\r\n" if self.chunked else b"",
                headers,
                self.cross_origin_headers,
                self._connection_line(),
                (chunk(first) if self.chunked else first) if first else b"",
            )
        )
        self.bytes_out += len(first)

    def _connection_line(self) -> bytes:
        if not self.keep_alive:
            return b"connection: close\r\n"
        # HTTP/1.0, whose clients otherwise wait for the end of the connection
        return b"" if self.chunked else b"connection: keep-alive\r\n"

    def write(self, data: bytes) -> None:
        """Send more of the stream, unbuffered."""
        if self.translation is not None:
            data = self.translation.events(data)
            if not data:  # an empty chunk would end the stream
                return
        num_bytes = len(data)
        self.bytes_out += num_bytes
        self._protocol.send(b"%x\r\n%b\r\n" % (num_bytes, data) if self.chunked else data)

    def end(self, last: bytes = b"") -> None:
        """End the stream, optionally with its last bytes."""
        if self.translation is not None:
            last = self.translation.events(last)
        self.bytes_out += len(last)
        if self.chunked:
            self._protocol.send((chunk(last) if last else b"") + LAST_CHUNK)
        elif last:
            self._protocol.send(last)
        self.ended = True

    def break_off(self) -> None:
        """Close the connection, so that the client can't mistake a partial response for a whole."""
        self.keep_alive = False
        self._protocol.close()

    def attach(self, source: Pausable | None) -> None:
        """Set the source that is paused while the client reads too slowly."""
        self.source = source
        if source is not None and self._protocol.is_write_paused:
            source.pause()
