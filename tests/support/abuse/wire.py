"""The attackers' means of communication: raw sockets, and a client that accepts any answer."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
from support.abuse.attack import Attempts, Target
from support.proxy_fakes_client import NO_TLS

CONNECT_S = 10.0
READ_BYTES = 1 << 16
CHUNK_BYTES = 1 << 20
ENDED = (OSError, EOFError)
"""Exceptions when the other side closes a connection."""


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0


@contextmanager
def connection(where: tuple[str, int]) -> Iterator[socket.socket]:
    """A TCP connection, closed afterwards."""
    with socket.create_connection(where, CONNECT_S) as sock:
        yield sock


def head(path: str, fields: Mapping[str, str], method: str = "POST") -> bytes:
    """A request's head."""
    lines = [f"{method} {path} HTTP/1.1", "host: x", *(f"{k}: {v}" for k, v in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def request(path: str, fields: Mapping[str, str], body: Any) -> bytes:
    """A whole request with JSON in it."""
    data = json.dumps(body).encode()
    return head(path, {**fields, "content-length": str(len(data))}) + data


def read_all(sock: socket.socket, seconds: float) -> bytes:
    """Bytes received until the other side closes or the time is up."""
    found = bytearray()
    deadline = time.monotonic() + seconds
    with suppress(*ENDED):
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            data = sock.recv(READ_BYTES)
            if not data:
                break
            found += data
    return bytes(found)


def send_forever(sock: socket.socket, piece: bytes, attempts: Attempts, max_bytes: int) -> int:
    """Send pieces until the other side closes, blocks for a second, or has received ``max_bytes``;
    returns the number of bytes sent."""
    sent = 0
    sock.settimeout(1.0)
    with suppress(*ENDED):
        while sent < max_bytes and not attempts.is_over:
            sent += sock.send(piece)
    return sent


@contextmanager
def client(target: Target, seconds: float = 60.0) -> Iterator[httpx.Client]:
    """A client of the proxy with a client's key."""
    options: dict[str, Any] = {"timeout": seconds * target.slack, "verify": NO_TLS}
    with httpx.Client(
        base_url=target.proxy, headers=target.headers, trust_env=False, **options
    ) as made:
        yield made


def expect(
    attempts: Attempts, response: httpx.Response, statuses: frozenset[int], what: str
) -> None:
    """Complain about any other status."""
    if response.status_code not in statuses:
        attempts.complain(f"{what}: {response.status_code} {response.text[:200]}")


def post(
    target: Target,
    attempts: Attempts,
    path: str,
    body: Any,
    *,
    allowed: frozenset[int],
    what: str,
    seconds: float = 60.0,
) -> None:
    """Send one request through the proxy; complain without an answer of an allowed status."""
    with client(target, seconds) as made:
        try:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            response = made.post(path, content=content)
        except httpx.HTTPError as exc:
            attempts.complain(f"{what}: {type(exc).__name__} {exc}")
        else:
            expect(attempts, response, allowed, what)
