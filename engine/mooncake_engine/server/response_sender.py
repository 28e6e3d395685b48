"""Sends the responses to generation requests, and the tokens of a step all at once."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from mooncake_engine.server.guarded_connection import WriteChunk
from mooncake_engine.server.openai_protocol import ApiError

_JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"


class StepWrites:
    """The streams that get a token of the step that is being delivered. They are written to one
    right after the other, when all their events are made: a client on the same host that reads many
    of them wakes up once and not for each, and takes less from who writes."""

    def __init__(self) -> None:
        self.senders: list[ResponseSender] = []
        """Who has something to write; the first one calls ``release_soon``."""

    def release_soon(self) -> None:
        """Release them when the event loop is done with what it does now."""
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        senders, self.senders = self.senders, []
        for sender in senders:
            sender.release()


class ResponseSender:
    """Sends one HTTP response over ASGI, whole or event by event. Its status goes with its first
    bytes, so that an error before them has a status of its own.

    Args:
        send: of the ASGI connection.
        request_id: in the response's headers.
        step_writes: of all connections of its event loop.
        write_chunk: the connection's short way for bytes of a body that has begun; None where it
            has none.
    """

    __slots__ = (
        "_flushing",
        "_held",
        "_is_streaming",
        "_pending",
        "_request_id",
        "_send",
        "_step_writes",
        "_write_chunk",
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
        self._request_id = request_id.encode()
        self._write_chunk = write_chunk
        self._is_streaming = False
        self._pending: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None

    async def whole(self, body: bytes) -> None:
        """A complete response in JSON."""
        await self._start(
            200, [(b"content-type", _JSON), (b"content-length", str(len(body)).encode())]
        )
        await self._send({"type": "http.response.body", "body": body})

    def write(self, events: bytes) -> None:
        """Events of a stream; the first ones send status 200. They go at once, or in order as soon
        as the client takes more: a request's length bounds what waits."""
        self._held += events
        self.release()

    def write_with_step(self, events: bytes) -> None:
        """The same, but with those of all other streams that get a token of the same step."""
        if not self._held:
            waiting = self._step_writes.senders
            if not waiting:
                self._step_writes.release_soon()
            waiting.append(self)
        self._held += events

    def release(self) -> None:
        """Write what is held for the step's other streams."""
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
        """The stream is complete."""
        self.release()
        await self._settle()
        await self._send({"type": "http.response.body", "body": b""})

    def close(self) -> None:
        """The client is gone: nothing more is sent."""
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
        """An error: with its own status, or as the last event of a stream that has begun."""
        if self._is_streaming or self._flushing is not None:
            self.write(b"data: " + error.body + b"\n\n")
            await self.end()
            return
        response = error.response()
        await self._start(error.status, response.raw_headers)
        await self._send({"type": "http.response.body", "body": error.body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [*headers, (b"x-request-id", self._request_id)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
