"""Limits of an instance's HTTP connections: heads, fields, times, pipelining, and their number."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from mooncake_engine.server.guarded_connection import (
    WRITE_CHUNK,
    ConnectionLimits,
    GuardedConnection,
)
from mooncake_engine.server.response_sender import ResponseSender, StepWrites

PATIENT = ConnectionLimits(head_s=300.0, body_s=300.0, stalled_s=300.0)
SHORT_S = 0.2
REQUEST = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: h\r\n"
LARGE = 64 << 20
WAIT_S = 60.0


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Responds with the size of the body; at ``/large``, with a large body."""
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    if scope["path"] == "/events":
        await send_events(scope, send)
        return
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/large":
        for _ in range(LARGE >> 20):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": str(num_bytes).encode()})


def event(index: int) -> bytes:
    return b"data: %d %s\n\n" % (index, b"x" * 5000)


NUM_EVENTS = 1500


async def send_events(scope: dict[str, Any], send: Any) -> None:
    """Sends more than socket buffers hold, without waiting for the reader."""
    sender = ResponseSender(send, "r", StepWrites(), scope["extensions"][WRITE_CHUNK])
    for index in range(NUM_EVENTS):
        write = sender.write if index % 3 else sender.write_with_step
        write(event(index))
        if index % 500 == 0:
            await asyncio.sleep(0)
    await sender.end()


Address = tuple[str, int]


@contextmanager
def served(limits: ConnectionLimits) -> Iterator[tuple[Address, uvicorn.Server]]:
    protocol = type("Limited", (GuardedConnection,), {"limits": limits})
    config = uvicorn.Config(app, loop="uvloop", http=protocol, ws="none", lifespan="off")
    config.log_config = None
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined,method-assign,unused-ignore]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[:2], server
        finally:
            server.should_exit = server.force_exit = True
            thread.join(WAIT_S)


def connect(address: Address) -> socket.socket:
    connection = socket.create_connection(address, timeout=WAIT_S)
    return connection


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has closed the connection, after any last response."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def ask(connection: socket.socket, request: bytes = REQUEST) -> bytes:
    connection.sendall(request)
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        piece = connection.recv(1 << 16)
        assert piece, answer
        answer += piece
    return answer


def send_all(connection: socket.socket, *pieces: bytes) -> None:
    """Send as much as the server accepts."""
    try:
        for piece in pieces:
            connection.sendall(piece)
    except ConnectionError:
        pass


def test_head_that_arrives_in_one_read_is_limited_as_well() -> None:
    head = REQUEST[:-2] + b"X-A: " + b"a" * PATIENT.head_bytes + b"\r\n\r\n"
    with served(PATIENT) as (address, _), connect(address) as connection:
        send_all(connection, head)
        assert b"400 Bad Request" in connection.recv(1 << 16)


def test_pipelined_requests_are_served_in_order() -> None:
    with served(PATIENT) as (address, _), connect(address) as connection:
        for _ in range(3):
            assert b"200 OK" in ask(connection)
        body = POST + b"Content-Length: 300000\r\n\r\n" + b"x" * 300_000
        assert b"300000" in ask(connection, body)


def test_events_arrive_in_order_at_a_slow_reader() -> None:
    with served(PATIENT) as (address, _), connect(address) as connection:
        head, _, body = ask(connection, REQUEST.replace(b"/", b"/events", 1)).partition(b"\r\n\r\n")
        assert b"text/event-stream" in head
        assert unchunked(body) == b"".join(map(event, range(NUM_EVENTS)))


def unchunked(body: bytes) -> bytes:
    pieces = []
    while body:
        size, _, body = body.partition(b"\r\n")
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(pieces)


HEADS = {
    "one long field": [POST, b"X: " + b"x" * (1 << 20)],
    "a long path": [b"GET /", b"x" * (1 << 20)],
    "many fields": [POST, *[f"X-{i}: y\r\n".encode() for i in range(1000)]],
    "a field without an end": [POST, *[b"X: " + b"x" * 1000] * 1000],
    "many trailers": [
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
        *[f"X-{i}: y\r\n".encode() for i in range(1000)],
    ],
    "a long trailer": [
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
        *[b"X: " + b"x" * 1000] * 1000,
    ],
    "a long chunk extension": [
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;",
        *[b"x" * 1000] * 1000,
    ],
    "many requests at once": [b"POST /large HTTP/1.1\r\nHost: h\r\n\r\n", REQUEST * 100],
}


@pytest.mark.parametrize("name", HEADS)
def test_exceeding_a_limit_closes_the_connection(name: str) -> None:
    with served(PATIENT) as (address, _), connect(address) as other:
        with connect(address) as connection:
            send_all(connection, *HEADS[name])
            assert is_ended(connection)
        assert b"200 OK" in ask(other)


SLOW = {
    "nothing": b"",
    "a piece of a head": POST,
    "a piece of a body": POST + b"Content-Length: 10\r\n\r\n123",
    "a piece of a chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12",
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_sender_is_disconnected(name: str) -> None:
    limits = replace(PATIENT, head_s=SHORT_S, body_s=SHORT_S)
    with served(limits) as (address, server), connect(address) as connection:
        send_all(connection, SLOW[name])
        assert is_ended(connection)
        assert not server.server_state.connections


def test_a_slowly_sent_head_has_one_deadline() -> None:
    with served(replace(PATIENT, head_s=SHORT_S)) as (address, _), connect(address) as connection:
        connection.settimeout(0.02)
        for _ in range(3000):
            try:
                connection.sendall(b"G" if not _ else b"E")
                if not connection.recv(100):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it was never cut off")


def test_the_head_timeout_does_not_apply_to_the_response() -> None:
    limits = replace(PATIENT, head_s=SHORT_S, body_s=SHORT_S)
    with served(limits) as (address, _), connect(address) as connection:
        assert b"200 OK" in ask(connection)
        with connect(address) as late:
            assert is_ended(late)  # its deadline has passed
        assert b"200 OK" in ask(connection)


def test_a_client_that_does_not_read_is_disconnected() -> None:
    with (
        served(replace(PATIENT, stalled_s=SHORT_S)) as (address, server),
        connect(address) as connection,
    ):
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: h\r\n\r\n")
        assert connection.recv(1)
        while server.server_state.connections:
            threading.Event().wait(0.01)


class SlowReader(asyncio.Transport):
    """A connection whose client has yet to read ``num_unread`` bytes."""

    num_unread = 100
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def test_a_client_that_reads_slowly_is_not_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = uvicorn.Config(app, http=GuardedConnection, ws="none", lifespan="off")
        config.log_config = None
        config.load()
        connection = GuardedConnection(config, ServerState(), {})
        timers: list[Callable[[], None]] = []
        transport = SlowReader()
        connection.connection_made(transport)
        loop = asyncio.get_running_loop()

        def call_later(
            after_s: float, call: Callable[..., None], *args: Any
        ) -> asyncio.TimerHandle:
            assert after_s == GuardedConnection.limits.stalled_s
            timers.append(lambda: call(*args))
            return loop.call_at(loop.time() + WAIT_S, call, *args)

        monkeypatch.setattr(loop, "call_later", call_later)
        connection.pause_writing()
        for transport.num_unread in (90, 40, 39):
            timers.pop()()
            assert not transport.is_aborted
        timers.pop()()
        assert transport.is_aborted
        assert not timers
        connection.connection_lost(ConnectionAbortedError())

    asyncio.run(scenario())


def test_the_longest_idle_connection_is_closed_for_a_new_one() -> None:
    with served(replace(PATIENT, connections=3)) as (address, server), ExitStack() as stack:
        known = [stack.enter_context(connect(address)) for _ in range(3)]
        for connection in known:
            ask(connection)
        newest = stack.enter_context(connect(address))
        assert b"200 OK" in ask(newest)
        assert is_ended(known[0])
        for connection in known[1:]:
            assert b"200 OK" in ask(connection)
        assert len(server.server_state.connections) == 3


def test_new_connection_is_rejected_if_none_is_idle() -> None:
    with served(replace(PATIENT, connections=2)) as (address, _), ExitStack() as stack:
        busy = [stack.enter_context(connect(address)) for _ in range(2)]
        for connection in busy:
            connection.sendall(POST + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\n")
            assert b"100 Continue" in connection.recv(100)
        newest = stack.enter_context(connect(address))
        assert is_ended(newest)
        for connection in busy:
            assert b"3" in ask(connection, b"abc")


def test_connections_use_half_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert ConnectionLimits.for_process().connections == 512
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert ConnectionLimits.for_process().connections == PATIENT.connections


SERVER_SCRIPT = """
import resource
from unittest.mock import Mock
from mooncake_engine.server.api_server import bind, run_server
from mooncake_engine.server.guarded_connection import GuardedConnection

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
run_server(None, bind("127.0.0.1", 0), Mock(tick=lambda now: True), lambda: None)
print(GuardedConnection.limits.connections)
"""


def test_server_raises_the_descriptor_limit_of_its_shell() -> None:
    """Otherwise it refuses clients beyond half of a shell's 1,024 descriptors."""
    ended = subprocess.run(
        [sys.executable, "-c", SERVER_SCRIPT], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "256\n"
