"""Connections to instances: one exchange must not affect the next."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop

from mooncake_proxy.errors import ConnectFailed, ConnectionLost, MalformedResponse
from mooncake_proxy.http1.connection_pool import ConnectionPool
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import (
    ClientContext,
    ClientLimits,
    UpstreamConnection,
)

GET = b"GET / HTTP/1.1\r\nhost: instance\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class SlowClient:
    """Pauses reading after the first bytes."""

    def __init__(self, source: UpstreamConnection) -> None:
        self.source = source
        self.data = b""

    def feed(self, data: bytes) -> None:
        self.data += data
        self.source.pause()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_slow_client_at_end_of_response_does_not_pause_next_response(
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
            with await pool.exchange(GET, deadline, await_body=False) as answer:
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


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def pool_of(serve: Serve) -> AsyncIterator[ConnectionPool]:
    """A connection pool to an instance that serves these bytes."""
    serving: set[asyncio.Task[Any]] = set()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(Origin("http", "127.0.0.1", port), ClientContext())
    try:
        yield pool
    finally:
        pool.close()
        server.close()
        await asyncio.wait(serving, timeout=10.0)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_host_of_an_instance_that_vanishes_is_noticed(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    """A reader that is only slow stays connected."""

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with pool_of(serve) as pool:
            connection = await pool.connect(pool.context.loop.time() + 60.0)
            assert connection._transport is not None
            sock = connection._transport.get_extra_info("socket")
            options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, o)) for o in options]
            assert found == [15, 5, 3, 0]
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            connection.close()

    run(main())


@pytest.mark.parametrize("is_late", [False, True], ids=["with the answer", "behind it"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_unsolicited_bytes_are_not_part_of_next_response(
    run: Callable[[Coroutine[Any, Any, None]], None], is_late: bool
) -> None:
    """The start of a second response after the first: the next request would receive its rest."""
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    beginning = b"HTTP/1.1 200 OK\r\ncontent-length: 30\r\n\r\nof another"

    async def main() -> None:
        may_follow = asyncio.Event()
        closed = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if may_follow.is_set():
                writer.write(whole)
            elif is_late:
                writer.write(whole)
                await may_follow.wait()
                writer.write(beginning)
            else:
                writer.write(whole + beginning)
            with suppress(ConnectionError):
                while await reader.read(4096):  # further requests here get no response
                    writer.write(whole)
            closed.set()

        async with pool_of(serve) as pool:
            deadline = pool.context.loop.time() + 60.0
            assert await asyncio.wait_for(pool.fetch(GET, deadline), 10.0) == b"ok"
            may_follow.set()
            await asyncio.wait_for(closed.wait(), 10.0)
            assert await asyncio.wait_for(pool.fetch(GET, deadline), 10.0) == b"ok"

    run(main())


class Gathered:
    """Collects a response body."""

    def __init__(self) -> None:
        self.data = b""

    def feed(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("rest", [b"0\r\n\r\n", b"garbage"])
def test_body_is_complete_despite_trailing_garbage(rest: bytes) -> None:
    """Invalid HTTP follows in the same packet as the end of the body."""

    async def main() -> None:
        may_end = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            await may_end.wait()
            writer.write(b"2\r\nok\r\n0\r\n\r\n" + rest)
            with suppress(ConnectionError):
                await reader.read()  # until it is closed, since it must not be reused

        async with pool_of(serve) as pool:
            deadline = pool.context.loop.time() + 60.0
            gathered = Gathered()
            with await pool.exchange(GET, deadline, await_body=False) as answer:
                may_end.set()
                await asyncio.wait_for(answer.forward(gathered), 10.0)
            assert gathered.data == b"ok"
            assert not answer.reusable

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_reset_response_without_length_is_incomplete(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def main() -> None:
        may_reset = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhalf of it")
            await may_reset.wait()
            connection = writer.get_extra_info("socket")
            linger = struct.pack("ii", 1, 0)  # close() sends a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

        async with pool_of(serve) as pool:
            deadline = pool.context.loop.time() + 60.0
            with await pool.exchange(GET, deadline, await_body=False) as answer:
                may_reset.set()
                with pytest.raises(ConnectionLost, match="connection lost after"):
                    await asyncio.wait_for(answer.read(), 10.0)

    run(main())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (HEAD, "the answer is larger than 100000 bytes"),
        (b"HTTP/1.1 200 OK\r\nx: ", "the head of the answer is larger than 1000 bytes"),
    ],
)
def test_endless_answer_is_not_held(head: bytes, message: str) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            with suppress(ConnectionError):
                while True:
                    writer.write(b"8\r\nan event\r\n" if head is HEAD else b"x" * 100)
                    await writer.drain()

        async with pool_of(serve) as pool:
            pool.context.limits = ClientLimits(max_head_bytes=1000, max_held_bytes=100_000)
            deadline = pool.context.loop.time() + 60.0
            with pytest.raises(MalformedResponse, match=message):
                await asyncio.wait_for(pool.fetch(GET, deadline), 10.0)

    uvloop.run(main())


def test_forwarded_answer_has_no_limit() -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + b"8\r\nan event\r\n" * 800_000 + b"0\r\n\r\n")

        async with pool_of(serve) as pool:
            pool.context.limits = ClientLimits(max_held_bytes=4_000_000)
            client = Gathered()
            deadline = pool.context.loop.time() + 60.0
            with await pool.exchange(GET, deadline, await_body=False) as answer:
                await asyncio.wait_for(answer.forward(client), 10.0)
            assert len(client.data) == 6_400_000

    uvloop.run(main())


def test_ca_certificates_of_host_are_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
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
