"""The client side of the proxy: handlers run in tasks, and their failures produce error
responses."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from mooncake_proxy.http1.connection_pool import timeout
from mooncake_proxy.http1.http_request import HttpRequest
from mooncake_proxy.http1.server_connection import (
    Handler,
    ServerContext,
    ServerProtocol,
)

REQUEST = b"GET /v1/models HTTP/1.1\r\nhost: proxy\r\n\r\n"


def answer_of(handler: Handler) -> bytes:
    """The complete response to one request, until the server closes the connection."""

    async def talk() -> bytes:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        context = ServerContext(handler)
        await loop.connect_accepted_socket(lambda: ServerProtocol(context), theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(REQUEST)
        reply = await reader.read()
        writer.close()
        await writer.wait_closed()
        return reply

    return asyncio.run(talk())


def test_failing_handler_returns_error_response(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: HttpRequest) -> None:
        raise ZeroDivisionError("mine")

    head, _, body = answer_of(fail).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in head
    assert json.loads(body)["error"] == {
        "message": "internal error of the proxy; its log has the details",
        "type": "internal_error",
        "param": None,
        "code": None,
    }
    assert "ZeroDivisionError: mine" in caplog.text
    assert "Traceback" in caplog.text


def test_stream_of_failing_handler_is_truncated(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(request: HttpRequest) -> None:
        request.start_stream("text/event-stream", b"", b"data: 1\n\n")
        raise ZeroDivisionError("mine")

    reply = answer_of(fail)
    assert reply.startswith(b"HTTP/1.1 200 ")
    # no last chunk, so that the client sees an incomplete response
    assert reply.endswith(b"data: 1\n\n\r\n")
    assert "ZeroDivisionError: mine" in caplog.text


def test_handler_runs_in_a_task_with_time_limits() -> None:
    async def wait(request: HttpRequest) -> None:
        assert asyncio.current_task() is not None
        with pytest.raises(asyncio.TimeoutError):
            async with timeout(0.01):
                await asyncio.Event().wait()
        request.keep_alive = False
        request.respond(200, b"late", "text/plain")

    assert answer_of(wait).endswith(b"late")


def test_handler_is_cancelled_on_client_disconnect() -> None:
    async def main() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def wait(request: HttpRequest) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        context = ServerContext(wait)
        await loop.connect_accepted_socket(lambda: ServerProtocol(context), theirs)
        ours.sendall(REQUEST)
        await started.wait()
        ours.close()
        await cancelled.wait()
        assert not context.connections

    asyncio.run(main())
