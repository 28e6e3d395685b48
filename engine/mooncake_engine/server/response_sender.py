"""Sends the responses of generation requests, and batches the tokens of a step over all streams."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from mooncake_engine.server.guarded_connection import WriteChunk
from mooncake_engine.server.openai_protocol import ApiError

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"


class StepWrites:
    """The streams that receive a token of the step that is being delivered; one per event loop.

    They are written back to back, once the events of all of them are encoded. A client on the same
    host that reads many streams then wakes up once instead of once per stream, and takes less CPU
    time from the server."""

    def __init__(self) -> None:
        self.senders: list[ResponseSender] = []
        """The senders with events to write. The first one to join calls ``release_soon``."""

    def release_soon(self) -> None:
        """Schedule a release of all senders after the event loop's current callbacks."""
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        senders, self.senders = self.senders, []
        for sender in senders:
            sender.release()


class ResponseSender:
    """Sends one HTTP response over ASGI, complete or event by event. The status is sent with the
    first bytes, so that an earlier error can have its own status.

    Args:
        send: the ``send`` callable of the ASGI connection.
        request_id: the request id for the response's headers.
        step_writes: the writes that all streams of the event loop share.
        write_chunk: the connection's fast path for bytes of a started body; None if it has none.
    """

    __slots__ = (
        "_flushing",
        "_held",
        "_is_streaming",
        "_pending",
        "_send",
        "_step_writes",
        "_write_chunk",
        "request_id",
    )

    def __init__(
        self,
        send: Send,
        request_id: str,
        step_writes: StepWrites,
        write_chunk: WriteChunk | None = None,
    ) -> None:
        self._send = send
        self._step_writes = step_writes
        self._held = b""
        self.request_id = request_id
        self._write_chunk = write_chunk
        self._is_streaming = False
        self._pending: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None

    async def send_json(self, body: bytes) -> None:
        """Send a complete JSON response."""
        await self._start(
            200, [(b"content-type", _JSON), (b"content-length", str(len(body)).encode())]
        )
        await self._send({"type": "http.response.body", "body": body})

    def write(self, events: bytes) -> None:
        """Send events of a stream; the first ones also send status 200. While the client reads too
        slowly, events are queued in order. The request's length bounds that queue."""
        self._held += events
        self.release()

    def write_with_step(self, events: bytes) -> None:
        """Send events of a stream together with those of all streams that receive a token of the
        same step."""
        if not self._held:
            waiting = self._step_writes.senders
            if not waiting:
                self._step_writes.release_soon()
            waiting.append(self)
        self._held += events

    def release(self) -> None:
        """Write the events that were held for the other streams of the step."""
        events, self._held = self._held, b""
        if not events:
            return
        if self._flushing is None and self._is_streaming:
            write_chunk = self._write_chunk
            if write_chunk is not None and write_chunk(events):
                return
        self._pending.append(events)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    async def end(self) -> None:
        """Send the end of the stream, after all its events."""
        self.release()
        await self._settle()
        await self._send({"type": "http.response.body", "body": b""})

    def close(self) -> None:
        """Drop events that were not sent; nothing more is sent."""
        self._held = b""
        if self._flushing is not None:
            self._flushing.cancel()

    async def _settle(self) -> None:
        if self._flushing is not None:
            await self._flushing

    async def _flush(self) -> None:
        while self._pending:
            events = b"".join(self._pending)
            self._pending.clear()
            if not self._is_streaming:
                self._is_streaming = True
                unbuffered = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
                await self._start(200, [(b"content-type", _EVENTS), *unbuffered])
            await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._flushing = None

    async def fail(self, error: ApiError) -> None:
        """Send an error, with its own status or as the last event of a started stream."""
        if self._is_streaming or self._flushing is not None:
            self.write(b"data: " + error.body + b"\n\n")
            await self.end()
            return
        response = error.response()
        await self._start(error.status, response.raw_headers)
        await self._send({"type": "http.response.body", "body": error.body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
