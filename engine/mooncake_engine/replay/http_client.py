"""One HTTP/1.1 POST per connection, its answer piece by piece. Enough to measure with."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from mooncake_engine.errors import ConfigError, EngineError
from mooncake_engine.timing import timeout

_PIECE_BYTES = 1 << 16
_CONNECT_S = 10.0


class ExchangeFailed(EngineError):
    """A request that was not answered, or not with 200."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go.

    Args:
        url: ``http://host:port`` or ``https://…``, with or without a path.
        headers: for every request.
        timeout_s: how long one exchange may take.

    Raises:
        ConfigError: no such URL.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be http://HOST:PORT or https://…, got {self.url!r}")

    async def post(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The answer's body as it arrives.

        Raises:
            ExchangeFailed: no connection, no answer in time, or a status other than 200.
        """
        try:
            async with timeout(_CONNECT_S):
                reader, writer = await self._connect()
        except (OSError, asyncio.TimeoutError) as exc:
            raise ExchangeFailed(f"can't connect to {self.url}: {str(exc) or 'timeout'}") from exc
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        try:
            writer.write(self._head(path, len(body)) + body)
            async with aclosing(_answer(reader, deadline)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        return await asyncio.open_connection(
            parts.hostname,
            parts.port or (443 if is_tls else 80),
            ssl=ssl.create_default_context() if is_tls else None,
        )

    def _head(self, path: str, num_bytes: int) -> bytes:
        parts = urlsplit(self.url)
        lines = [f"POST {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


class _Response:
    """What the parser has understood."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_complete = False

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.is_complete = True


async def _answer(reader: asyncio.StreamReader, deadline: float) -> AsyncGenerator[bytes, None]:
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    refusal: list[bytes] = []
    while not response.is_complete:
        data = await _read(reader, deadline)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as exc:
            raise ExchangeFailed(f"the answer is no HTTP: {exc}") from exc
        pieces, response.pieces = response.pieces, []
        if pieces and parser.get_status_code() != 200:
            refusal += pieces
        elif pieces:
            yield b"".join(pieces)
    if parser.get_status_code() != 200:
        words = b"".join(refusal).decode(errors="replace")[:300]
        raise ExchangeFailed(f"status {parser.get_status_code()}: {words}")


async def _read(reader: asyncio.StreamReader, deadline: float) -> bytes:
    """Some bytes of the answer.

    Raises:
        ExchangeFailed: it ends in the middle, or is late.
    """
    try:
        async with timeout(deadline - asyncio.get_running_loop().time()):
            data = await reader.read(_PIECE_BYTES)
    except (OSError, asyncio.TimeoutError) as exc:
        raise ExchangeFailed(f"the answer stopped: {str(exc) or 'timeout'}") from exc
    if not data:
        raise ExchangeFailed("the connection ended in the middle of the answer")
    return data
