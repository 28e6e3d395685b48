"""The client side of the proxy when its handler is at fault."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from mooncake_proxy.http1.server import Exchange, Handler, ServerContext, ServerProtocol

REQUEST = b"GET /v1/models HTTP/1.1\r\nhost: proxy\r\n\r\n"


def ask(handler: Handler) -> bytes:
    """All that the server says to one request, until it closes the connection."""

    async def talk() -> bytes:
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        context = ServerContext(handler)
        await loop.connect_accepted_socket(lambda: ServerProtocol(context), theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(REQUEST)
        said = await reader.read()
        writer.close()
        await writer.wait_closed()
        return said

    return asyncio.run(talk())


def test_a_handler_that_fails_is_answered_for(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(exchange: Exchange) -> None:
        raise ZeroDivisionError("mine")

    head, _, body = ask(fail).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in head
    assert json.loads(body)["error"] == {
        "message": "the proxy failed at this request; its log says how",
        "type": "internal_error",
        "param": None,
        "code": None,
    }
    assert "ZeroDivisionError: mine" in caplog.text
    assert "Traceback" in caplog.text


def test_a_stream_whose_handler_fails_is_broken_off(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(exchange: Exchange) -> None:
        exchange.start_stream("text/event-stream", b"", b"data: 1\n\n")
        raise ZeroDivisionError("mine")

    said = ask(fail)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert said.endswith(b"data: 1\n\n\r\n")  # no last chunk: this is not the whole answer
    assert "ZeroDivisionError: mine" in caplog.text
