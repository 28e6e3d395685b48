"""Clients without a key can make the proxy and an instance hold only little memory."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from support.programs import TINY_LLAMA, Program, running
from support.resident_memory import PeakMemory

SENT = 32 << 20
PIECE = 64 << 10
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer wrong\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"


@dataclass(frozen=True)
class Target:
    url: str
    program: Program

    def connect(self) -> socket.socket:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connection = socket.create_connection((parts.hostname, parts.port), timeout=5.0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return connection


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("the-only-key\n")
    return path


@pytest.fixture(scope="module", params=["proxy", "instance"])
def target(request: pytest.FixtureRequest, keys: Path) -> Iterator[Target]:
    with ExitStack() as stack:
        if request.param == "proxy":
            argv = ["mooncake_proxy", "--prefill", "http://127.0.0.1:1"]
            argv += ["--decode", "http://127.0.0.1:2"]
            words = "listens on"
        else:
            argv = ["mooncake_engine.cli", "serve", "--model", str(TINY_LLAMA), "--threads", "1"]
            argv += ["--num-kv-blocks", "64"]
            words = "ready "
        argv += ["--port", "0", "--api-key-file", str(keys)]
        program = stack.enter_context(running(*argv))
        url = program.wait_for(words).split()[-1]
        httpx.get(f"{url}/metrics")  # memory that the first request loads does not count
        yield Target(url, program)


def send(connection: socket.socket, pieces: Iterable[bytes]) -> None:
    """Send everything, or until the server stops reading."""
    with suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)


def pieces_of(line: bytes, total: int = SENT) -> list[bytes]:
    return [line * (PIECE // len(line))] * (total // PIECE)


def pipelined(target: Target, stack: ExitStack) -> None:
    """An endless series of requests whose responses the client does not read."""
    for _ in range(8):
        connection = stack.enter_context(target.connect())
        connection.settimeout(1.0)
        send(connection, pieces_of(GET))


def never_reading(target: Target, stack: ExitStack) -> None:
    """Many clients that request large responses and read none."""
    ask = b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n"
    for _ in range(100):
        send(stack.enter_context(target.connect()), [ask])


def trailers(target: Target, stack: ExitStack) -> None:
    connection = stack.enter_context(target.connect())
    send(connection, [HEAD, b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *pieces_of(b"A: b\r\n")])


def one_trailer(target: Target, stack: ExitStack) -> None:
    connection = stack.enter_context(target.connect())
    start = b"Transfer-Encoding: chunked\r\n\r\n0\r\nA: "
    send(connection, [HEAD, start, *pieces_of(b"a")])


def bodies(target: Target, stack: ExitStack) -> None:
    """Request bodies of clients without a key."""
    for _ in range(4):
        connection = stack.enter_context(target.connect())
        connection.settimeout(2.0)
        length = f"Content-Length: {SENT}\r\n\r\n".encode()
        send(connection, [HEAD + length, *pieces_of(b"x")])


def headers(target: Target, stack: ExitStack) -> None:
    for line in (b"A: b\r\n", b"A: " + b"b" * 1000 + b"\r\n"):
        send(stack.enter_context(target.connect()), [HEAD, *pieces_of(line)])


def one_header(target: Target, stack: ExitStack) -> None:
    send(stack.enter_context(target.connect()), [HEAD + b"A: ", *pieces_of(b"a")])


def chunk_sizes(target: Target, stack: ExitStack) -> None:
    start = b"Transfer-Encoding: chunked\r\n\r\n1;"
    send(stack.enter_context(target.connect()), [HEAD + start, *pieces_of(b"x")])


ATTACKS: dict[Callable[[Target, ExitStack], None], int] = {
    pipelined: 48,
    never_reading: 24,
    trailers: 16,
    one_trailer: 16,
    bodies: 24,
    headers: 16,
    one_header: 16,
    chunk_sizes: 16,
}
"""Attacks with the MiB that each may cost; they send at least 32 MiB."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_unauthenticated_data_uses_bounded_memory(
    target: Target, attack: Callable[[Target, ExitStack], None]
) -> None:
    memory = PeakMemory(target.program.process.pid)
    with ExitStack() as connections:
        attack(target, connections)
        assert httpx.get(f"{target.url}/health", timeout=60.0).status_code in (200, 503)
        assert memory.growth_mib < ATTACKS[attack]
    assert target.program.process.poll() is None
