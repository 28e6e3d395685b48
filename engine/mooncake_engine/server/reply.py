"""One HTTP answer: its status is sent with its first bytes, and an error always has a place."""

from __future__ import annotations

from starlette.types import Send

from mooncake_engine.server.errors import ApiError

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"


class Reply:
    """Sends an answer over ASGI, whole or event by event."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self._is_streaming = False

    async def whole(self, body: bytes) -> None:
        """A complete answer in JSON."""
        await self._start(200, [(b"content-type", _JSON), _length(body)])
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, event: bytes) -> None:
        """A piece of a stream; the first one brings status 200 with it."""
        if not self._is_streaming:
            self._is_streaming = True
            unbuffered = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await self._start(200, [(b"content-type", _EVENTS), *unbuffered])
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """The stream is complete."""
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """An error: with its own status, or as the last event of a stream that has begun."""
        if self._is_streaming:
            await self.event(b"data: " + error.body + b"\n\n")
            await self.end()
            return
        response = error.response()
        await self._start(error.status, response.raw_headers)
        await self._send({"type": "http.response.body", "body": error.body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"x-request-id", self._request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", str(len(body)).encode()
