"""The HTTP client of ``bench`` and ``bench serve``: sends a request to an OpenAI endpoint and
records when each piece of the response arrives."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from mooncake_engine.config_checks import check_url
from mooncake_engine.errors import EngineError
from mooncake_engine.replay.latency_summary import Record
from mooncake_engine.replay.trace import probe_text
from mooncake_hal.timing import timeout

REFUSALS = frozenset({429, 503})
"""Statuses of a server that rejects a request for lack of capacity."""
_PIECE_BYTES = 1 << 16
_CONNECT_S = 10.0


class ExchangeFailed(EngineError):
    """A request that was not answered, or not with status 200.

    Args:
        message: what happened.
        status: the status of the response; None if there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class TargetServer:
    """The server to which requests are sent.

    Args:
        url: ``http://host:port`` or ``https://…``, with or without a path.
        headers: headers of every request.
        timeout_s: the timeout of one exchange in seconds.
        verifies_certificates: whether to verify the server's certificate with ``https``.

    Raises:
        ConfigError: the URL is invalid.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 3600.0
    verifies_certificates: bool = True

    def __post_init__(self) -> None:
        check_url("--url", self.url)

    async def get(self, path: str) -> bytes:
        """Send a GET request; returns the body of the response.

        Raises:
            ExchangeFailed: see ``post``.
        """
        async with aclosing(self._exchange(self._head("GET", path, 0, {}))) as pieces:
            return b"".join([piece async for piece in pieces])

    def post(
        self, path: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncGenerator[bytes, None]:
        """Send a POST request; yields the body of the response as it arrives.

        Args:
            headers: additional headers of this request.

        Raises:
            ExchangeFailed: the connection fails, the response is late, or its status is not 200.
        """
        return self._exchange(self._head("POST", path, len(body), headers) + body)

    async def _exchange(self, request: bytes) -> AsyncGenerator[bytes, None]:
        try:
            async with timeout(_CONNECT_S):
                reader, writer = await self._connect()
        except (OSError, asyncio.TimeoutError) as exc:
            raise ExchangeFailed(f"can't connect to {self.url}: {str(exc) or 'timeout'}") from exc
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        try:
            writer.write(request)
            async with aclosing(_answer(reader, deadline)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        context = ssl.create_default_context() if is_tls else None
        if context is not None and not self.verifies_certificates:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        port = parts.port or (443 if is_tls else 80)
        return await asyncio.open_connection(parts.hostname, port, ssl=context)

    def _head(self, method: str, path: str, num_bytes: int, headers: Mapping[str, str]) -> bytes:
        parts = urlsplit(self.url)
        lines = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}"]
        lines += [f"{name}: {value}" for name, value in {**self.headers, **headers}.items()]
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


class _Response:
    """The callbacks of the HTTP parser, and what it has parsed."""

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
    error_body: list[bytes] = []
    while not response.is_complete:
        data = await _read(reader, deadline)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as exc:
            raise ExchangeFailed(f"the response is not HTTP: {exc}") from exc
        pieces, response.pieces = response.pieces, []
        if pieces and parser.get_status_code() != 200:
            error_body += pieces
        elif pieces:
            yield b"".join(pieces)
    status = parser.get_status_code()
    if status != 200:
        reason = b"".join(error_body).decode(errors="replace")[:300]
        raise ExchangeFailed(f"status {status}: {reason}", status)


async def _read(reader: asyncio.StreamReader, deadline: float) -> bytes:
    """The next bytes of the response.

    Raises:
        ExchangeFailed: the connection ends before the response does, or the response is late.
    """
    try:
        async with timeout(deadline - asyncio.get_running_loop().time()):
            data = await reader.read(_PIECE_BYTES)
    except (OSError, asyncio.TimeoutError) as exc:
        raise ExchangeFailed(f"reading the response failed: {str(exc) or 'timeout'}") from exc
    if not data:
        raise ExchangeFailed("the connection closed before the end of the response")
    return data


_PROBE_WORDS = (100, 300)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    """A choice of a chunk, of completions (``text``) or chat (``delta``)."""

    text: str | None = None
    delta: _Delta | None = None

    @property
    def shows_something(self) -> bool:
        delta = self.delta
        return bool(self.shown_text or (delta is not None and delta.tool_calls))

    @property
    def shown_text(self) -> str:
        delta = self.delta or _Delta()
        reasoning = delta.reasoning or delta.reasoning_content or ""
        return (self.text or "") + reasoning + (delta.content or "")


class _Event(msgspec.Struct):
    """A chunk of a streamed answer, or the error that ends it."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class ReplayClient:
    """Sends completion requests to an endpoint under test.

    Args:
        server: the endpoint's server.
        model: the model to request.
        is_chat: whether to use ``/v1/chat/completions``.
        ignores_eos: whether to send ``ignore_eos``, which OpenAI's API does not have, so that
            answers are as long as the trace says.
        path: the endpoint's path on the server; None for OpenAI's.
        fields: additional fields of every body; they override the client's own.
    """

    server: TargetServer
    model: str
    is_chat: bool = False
    ignores_eos: bool = True
    path: str | None = None
    fields: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})

    async def ask(self, prompt: str, max_tokens: int, record: Record) -> None:
        """Send a request and fill in its record. A failure is recorded, not raised."""
        record.sent_s = time.perf_counter()
        try:
            body = self._body(prompt, max_tokens, stream=True)
            async with aclosing(self._events(body, record.request_id)) as found:
                async for event in found:
                    _note(event, record)
            if not record.piece_times_s:
                raise ExchangeFailed("the answer is empty")
        except ExchangeFailed as exc:
            record.error = str(exc)
            record.is_refused = exc.status in REFUSALS
        record.end_s = time.perf_counter()

    async def tokens_per_word(self) -> float:
        """Measure how many of the model's tokens a word of the generated prompts has.

        Raises:
            ExchangeFailed: the endpoint does not answer, or does not report token counts.
        """
        counts = [await self._count_tokens(num_words) for num_words in _PROBE_WORDS]
        per_word = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
        if per_word <= 0:
            raise ExchangeFailed(
                f"{self.server.url} does not report prompt tokens in usage: set --tokens-per-word"
            )
        return per_word

    async def _count_tokens(self, num_words: int) -> int:
        body = self._body(probe_text(num_words, f"probe {num_words}"), 1, stream=False)
        async with aclosing(self.server.post(self._path, body)) as pieces:
            answer = b"".join([piece async for piece in pieces])
        try:
            usage = _decode(answer).usage
        except msgspec.DecodeError as exc:
            raise ExchangeFailed(f"the response is not a completion: {exc}") from exc
        return usage.prompt_tokens if usage else 0

    @property
    def _path(self) -> str:
        return self.path or ("/v1/chat/completions" if self.is_chat else "/v1/completions")

    def _body(self, prompt: str, max_tokens: int, *, stream: bool) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignores_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **self.fields})

    async def _events(self, body: bytes, request_id: str) -> AsyncGenerator[_Event, None]:
        held = b""
        headers = {"X-Request-Id": request_id} if request_id else {}
        async with aclosing(self.server.post(self._path, body, headers)) as pieces:
            async for piece in pieces:
                *lines, held = (held + piece).split(b"\n")
                for line in lines:
                    payload = line.strip().removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and payload != b"[DONE]":
                        yield _parse_event(payload)


def _parse_event(payload: bytes) -> _Event:
    try:
        event = _decode(payload)
    except msgspec.DecodeError as exc:
        raise ExchangeFailed(f"an event is not a chunk of a completion: {exc}") from exc
    if event.error is not None:
        raise ExchangeFailed(str(event.error.get("message", event.error)))
    return event


def _note(event: _Event, record: Record) -> None:
    if any(choice.shows_something for choice in event.choices):
        record.piece_times_s.append(time.perf_counter())
        record.pieces.append("".join(choice.shown_text for choice in event.choices))
    if event.usage is not None:
        record.num_input = event.usage.prompt_tokens
        record.num_output = event.usage.completion_tokens
        details = event.usage.prompt_tokens_details or {}
        record.num_cached = details.get("cached_tokens") or 0
