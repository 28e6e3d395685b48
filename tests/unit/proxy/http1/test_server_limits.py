"""Resource limits of one client connection: requests, headers, trailers, bodies, reads."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from mooncake_proxy.http1.http_request import HttpRequest
from mooncake_proxy.http1.server_connection import (
    ServerContext,
    ServerLimits,
    ServerProtocol,
)

GET = b"GET /x HTTP/1.1\r\nhost: proxy\r\n\r\n"
LARGE = b"x" * 50_000


class Line:
    """A raw client of a server with a handler from the test."""

    def __init__(self, context: ServerContext, ours: socket.socket) -> None:
        self.context = context
        self.socket = ours
        self.seen: list[HttpRequest] = []

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self, end: bytes | None = None) -> bytes:
        """Read up to `end`, or everything until the server closes."""
        response = b""
        with suppress(ConnectionError):
            while end is None or end not in response:
                data = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
                if not data:
                    break
                response += data
        return response

    @property
    def protocol(self) -> ServerProtocol:
        [protocol] = self.context.connections
        return protocol


def talk(
    test: Callable[[Line], Awaitable[None]],
    limits: ServerLimits | None = None,
    body_limit: Callable[[HttpRequest], int] | None = None,
    answer: bytes = b"ok",
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        seen: list[HttpRequest] = []

        async def handler(request: HttpRequest) -> None:
            seen.append(request)
            await asyncio.sleep(0)
            request.respond(200, answer, "text/plain")

        context = ServerContext(handler, limits or ServerLimits(), body_limit)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: ServerProtocol(context), theirs)
        line = Line(context, ours)
        line.seen = seen
        try:
            await asyncio.wait_for(test(line), 10)
        finally:
            ours.close()
            while context.connections:  # noqa: ASYNC110  # its end is an event of the transport
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_pipelined_requests_wait_while_responses_are_unread() -> None:
    async def test(line: Line) -> None:
        sender = asyncio.ensure_future(line.send(GET * 200))
        await asyncio.sleep(0.2)
        assert len(line.seen) < 40, "a paused connection starts no next request"
        reader = asyncio.ensure_future(line.read())
        while len(line.seen) < 200:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await sender
        reader.cancel()
        with suppress(asyncio.CancelledError):
            await reader

    talk(test, answer=LARGE)


def test_client_that_never_reads_is_dropped() -> None:
    async def test(line: Line) -> None:
        await line.send(GET * 20)
        while not line.protocol.is_write_paused:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        now = asyncio.get_running_loop().time()
        line.protocol.sweep(now + 1.0)
        await asyncio.sleep(0.01)
        assert line.context.connections
        line.protocol.sweep(now + ServerLimits().write_timeout_s + 1.0)
        while line.context.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    talk(test, answer=LARGE)


def test_flush_of_closing_connection_times_out() -> None:
    async def test(line: Line) -> None:
        await line.send(b"GET /x HTTP/1.1\r\nhost: proxy\r\nconnection: close\r\n\r\n")
        while not line.seen or not line.seen[0].ended:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        now = asyncio.get_running_loop().time()
        line.protocol.sweep(now)
        line.protocol.sweep(now + ServerLimits().close_timeout_s + 1.0)
        while line.context.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    talk(test, answer=LARGE * 20)


def test_slow_reader_receives_complete_last_response() -> None:
    async def test(line: Line) -> None:
        await line.send(b"GET /x HTTP/1.1\r\nhost: proxy\r\nconnection: close\r\n\r\n")
        while not line.seen or not line.seen[0].ended:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        now, response = asyncio.get_running_loop().time(), b""
        while line.context.connections:
            data = await asyncio.get_running_loop().sock_recv(line.socket, 1 << 16)
            response += data
            await asyncio.sleep(0.001)
            now += 4.0
            for protocol in line.context.connections:
                protocol.sweep(now)
        response += await line.read()
        assert response.endswith(LARGE)
        assert len(response) > 20 * len(LARGE)

    talk(test, answer=LARGE * 20)


def test_body_in_tiny_chunks_costs_its_size() -> None:
    num_pieces = 100_000

    async def check(line: Line) -> None:
        await line.send(b"POST /x HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n")
        pieces = b"2\r\nab\r\n" * num_pieces
        tracemalloc.start()
        await line.send(pieces)
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        await line.send(b"0\r\n\r\n")
        assert b" 200 " in await line.read(b"ok")
        assert line.seen[0].body == b"ab" * num_pieces
        assert grown < 8 * num_pieces, "bytes; a list of its pieces takes 43 each"

    talk(check)


def posted(num_bytes: int, num_sent: int) -> bytes:
    head = b"POST /x HTTP/1.1\r\nhost: proxy\r\ncontent-length: %d\r\n\r\n" % num_bytes
    return head + b"x" * num_sent


HELD = ServerLimits(max_body_bytes=1000, max_held_bytes=2500)


def test_incomplete_bodies_are_bounded_over_all_connections() -> None:
    async def check(line: Line) -> None:
        loop, context = asyncio.get_running_loop(), line.context
        others = []
        for _ in range(2):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            await loop.connect_accepted_socket(lambda: ServerProtocol(context), theirs)
            await loop.sock_sendall(ours, posted(1000, 999))
            others.append(ours)
        while context.num_held_bytes < 1998:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await line.send(posted(1000, 600))
        answers = await asyncio.wait(
            [asyncio.ensure_future(loop.sock_recv(each, 4096)) for each in others],
            return_when=asyncio.FIRST_COMPLETED,
        )
        [refused] = answers[0]
        assert b"HTTP/1.1 503 " in refused.result(), "not the one that holds most"
        assert context.num_held_bytes == 999 + 600
        for each in answers[1]:
            each.cancel()
        await line.send(b"x" * 400)
        assert b" 200 " in await line.read(b"ok")
        assert context.num_held_bytes == 999
        for each in others:
            each.close()
        while context.num_held_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    talk(check, HELD)


def test_connection_whose_last_body_is_unwanted_gives_up_what_is_queued() -> None:
    """Nothing more is read from it, so that it can't be refused: the search never ended."""

    async def main() -> None:
        async def handler(request: HttpRequest) -> None:
            await asyncio.Event().wait()

        def limit_of(request: HttpRequest) -> int:
            return 0 if request.target == b"/none" else 1000

        context = ServerContext(handler, HELD, limit_of)
        loop = asyncio.get_running_loop()
        ends = []
        for _ in range(2):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            await loop.connect_accepted_socket(lambda: ServerProtocol(context), theirs)
            ends.append(ours)
        unwanted = b"POST /none HTTP/1.1\r\nhost: proxy\r\ncontent-length: 5\r\n\r\nhello"
        await loop.sock_sendall(ends[0], GET + posted(1000, 1000) * 2 + unwanted)
        while context.num_held_bytes < 2000:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await loop.sock_sendall(ends[1], posted(1000, 999))
        assert await loop.sock_recv(ends[0], 1) == b""
        assert context.num_held_bytes == 999
        for each in ends:
            each.close()
        while context.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_connection_over_the_limit_replaces_one_without_a_request() -> None:
    async def main() -> None:
        wait = asyncio.Event()

        async def handler(request: HttpRequest) -> None:
            await wait.wait()
            request.respond(200, b"ok", "text/plain")

        context = ServerContext(handler, max_connections=2)
        loop = asyncio.get_running_loop()

        async def connected() -> socket.socket:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            await loop.connect_accepted_socket(lambda: ServerProtocol(context), theirs)
            return ours

        started = [await connected()]
        await loop.sock_sendall(started[0], posted(1000, 999))
        while not context.num_held_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        started += [await connected(), await connected()]
        assert await loop.sock_recv(started[0], 1) == b"", "it has waited longest"
        assert (len(context.connections), context.num_held_bytes) == (2, 0)
        for each in started[1:]:
            await loop.sock_sendall(each, GET)
        while not all(each.is_busy for each in context.connections):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        refused = await connected()
        assert await loop.sock_recv(refused, 1) == b"", "all others have a request"
        wait.set()
        for each in started[1:]:
            assert b" 200 " in await loop.sock_recv(each, 4096)
        for each in (*started, refused):
            each.close()
        while context.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_bodies_queued_behind_running_request_are_bounded() -> None:
    async def check(line: Line) -> None:
        await line.send(GET + posted(1000, 1000) * 3)
        response = await line.read()
        assert line.context.num_held_bytes == 0
        assert response.startswith(b"HTTP/1.1 503 ")
        assert line.seen == []

    talk(check, HELD)


@pytest.mark.parametrize("num_sent", [3, 0])
def test_completed_requests_are_not_counted(num_sent: int) -> None:
    async def check(line: Line) -> None:
        for _ in range(5):
            await line.send(posted(num_sent, num_sent))
            assert b" 200 " in await line.read(b"ok")
            assert line.context.num_held_bytes == 0

    talk(check, HELD)


CHUNKED = b"POST /x HTTP/1.1\r\nhost: proxy\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"


def test_trailers_are_dropped_and_never_become_headers() -> None:
    async def test(line: Line) -> None:
        await line.send(CHUNKED + b"authorization: Bearer stolen\r\nhost: other\r\n\r\n")
        await line.read(b"ok")
        [request] = line.seen
        assert request.body == b"hi"
        assert b"authorization" not in request.headers
        assert request.headers[b"host"] == b"proxy"

    talk(test)


@pytest.mark.parametrize("trailers", [b"x-t: 1\r\n" * 20_000, b"x-t: " + b"1" * 150_000])
def test_trailers_are_bounded(trailers: bytes) -> None:
    async def test(line: Line) -> None:
        await line.send(CHUNKED)
        with suppress(ConnectionError):
            for start in range(0, len(trailers), 8192):
                await line.send(trailers[start : start + 8192])
                await asyncio.sleep(0)
        assert (await line.read()).startswith(b"HTTP/1.1 431 ")
        assert not line.seen

    talk(test)


@pytest.mark.parametrize(
    "head",
    [b"".join(b"x-%d: 1\r\n" % n for n in range(201)), b"x-h: " + b"1" * 70_000 + b"\r\n"],
    ids=["many", "long"],
)
def test_headers_are_bounded(head: bytes) -> None:
    async def test(line: Line) -> None:
        await line.send(b"GET /x HTTP/1.1\r\nhost: proxy\r\n" + head + b"\r\n")
        assert (await line.read()).startswith(b"HTTP/1.1 431 ")
        assert not line.seen

    talk(test)


def test_split_headers_after_large_body_are_not_too_large() -> None:
    async def test(line: Line) -> None:
        body = b"b" * 200_000
        first = b"POST /x HTTP/1.1\r\nhost: proxy\r\ncontent-length: %d\r\n\r\n" % len(body)
        line.protocol.data_received(first + body + GET[:12])
        line.protocol.data_received(GET[12:])
        await line.read(b"okHTTP/1.1 200 ")
        assert [request.method for request in line.seen] == ["POST", "GET"]

    talk(test)


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: b\r\n"])
def test_request_must_have_one_host(hosts: bytes) -> None:
    async def test(line: Line) -> None:
        await line.send(b"GET /x HTTP/1.1\r\n" + hosts + b"\r\n")
        assert (await line.read()).startswith(b"HTTP/1.1 400 ")

    talk(test)


def test_offer_to_upgrade_is_ignored() -> None:
    async def test(line: Line) -> None:
        await line.send(
            b"POST /x?q=1 HTTP/1.1\r\nhost: proxy\r\nconnection: Upgrade, HTTP2-Settings\r\n"
            b"upgrade: h2c\r\nhttp2-settings: AAMAAABk\r\ncontent-length: 4\r\n\r\nbody"
        )
        assert (await line.read(b"ok")).startswith(b"HTTP/1.1 200 ")
        await line.send(GET)
        await line.read(b"ok")
        first, second = line.seen
        assert (first.method, first.target, first.body) == ("POST", b"/x?q=1", b"body")
        assert b"upgrade" not in first.headers
        assert first.keep_alive
        assert second.method == "GET"

    talk(test)


def test_100_continue_is_sent_in_request_order() -> None:
    async def test(line: Line) -> None:
        second = (
            b"POST /x HTTP/1.1\r\nhost: proxy\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
        )
        line.protocol.data_received(GET + second)
        assert (await line.read(b"Continue\r\n\r\n")).endswith(b"okHTTP/1.1 100 Continue\r\n\r\n")
        await line.send(b"body")
        assert (await line.read(b"ok")).startswith(b"HTTP/1.1 200 ")
        assert line.seen[1].body == b"body"

    talk(test)


def test_request_without_body_is_answered_after_headers() -> None:
    async def test(line: Line) -> None:
        await line.send(b"POST /x HTTP/1.1\r\nhost: proxy\r\ncontent-length: 9999999\r\n\r\n")
        response = await line.read(b"ok")
        assert b"connection: close" in response
        [request] = line.seen
        assert request.body == b""
        with suppress(ConnectionError):
            await line.send(b"b" * 500_000)

    talk(test, body_limit=lambda request: 0)


def test_each_request_has_its_own_body_limit() -> None:
    async def test(line: Line) -> None:
        await line.send(b"POST /x HTTP/1.1\r\nhost: proxy\r\ncontent-length: 11\r\n\r\n")
        response = await line.read()
        assert response.startswith(b"HTTP/1.1 413 ")
        assert b"at most 10 " in response

    talk(test, body_limit=lambda request: 10)
