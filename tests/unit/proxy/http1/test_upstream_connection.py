"""Connections to instances: what one exchange leaves behind for the next."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from mooncake_proxy.errors import ConnectFailed
from mooncake_proxy.http1.connection_pool import ConnectionPool
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext, UpstreamConnection

GET = b"GET / HTTP/1.1\r\nhost: instance\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class SlowClient:
    """Has enough with the first bytes that it gets."""

    def __init__(self, source: UpstreamConnection) -> None:
        self.source = source
        self.data = b""

    def feed(self, data: bytes) -> None:
        self.data += data
        self.source.pause()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_is_behind_at_the_end_of_an_answer_pauses_nothing_of_the_next(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def main() -> None:
        connections: list[asyncio.StreamWriter] = []
        may_end = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            while await reader.read(4096):
                writer.write(HEAD)
                await may_end.wait()
                writer.write(b"5\r\nwhole\r\n0\r\n\r\n")

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        context = ClientContext()
        pool = ConnectionPool(Origin("http", "127.0.0.1", port), context)
        deadline = context.loop.time() + 60.0
        try:
            with await pool.exchange(GET, deadline, whole=False) as answer:
                may_end.set()
                client = SlowClient(answer)
                await answer.forward(client)
            assert client.data == b"whole"
            assert await asyncio.wait_for(pool.fetch(GET, deadline), 10.0) == b"whole"
            assert len(connections) == 1, "the connection was kept"
        finally:
            pool.close()
            server.close()
            for connection in connections:
                connection.transport.abort()

    run(main())


def test_the_authorities_of_this_host_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ssl.SSLContext] = []
    create = ssl.create_default_context

    def count() -> ssl.SSLContext:
        made.append(create())
        return made[-1]

    async def main() -> None:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        context = ClientContext()
        assert context.tls_of("http") is None
        pool = ConnectionPool(Origin("https", "127.0.0.1", port), context)
        for _ in range(3):
            with pytest.raises(ConnectFailed):
                await pool.connect(context.loop.time() + 60.0)
        server.close()

    monkeypatch.setattr(ssl, "create_default_context", count)
    asyncio.run(main())
    assert len(made) == 1
