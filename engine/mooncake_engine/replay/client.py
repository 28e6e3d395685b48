"""Asks an OpenAI endpoint for one answer, and notes when each piece of it came."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from mooncake_engine.replay.http_client import ExchangeFailed, Server
from mooncake_engine.replay.measure import Record
from mooncake_engine.replay.prompts import probe_text

_PROBE_WORDS = (100, 300)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def shows_something(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content or delta.tool_calls)


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True)
class Client:
    """An endpoint under test.

    Args:
        server: where it is.
        model: to ask for.
        is_chat: use ``/v1/chat/completions``.
        ignores_eos: send ``ignore_eos``, which OpenAI does not know, so that answers are as long
            as the trace says.
    """

    server: Server
    model: str
    is_chat: bool = False
    ignores_eos: bool = True

    async def ask(self, prompt: str, max_tokens: int, record: Record) -> None:
        """Send a request and fill its record; a failure is noted in it, not raised."""
        record.sent_s = time.perf_counter()
        try:
            async with aclosing(self._events(self._body(prompt, max_tokens, stream=True))) as found:
                async for event in found:
                    _note(event, record)
            if not record.piece_times_s:
                raise ExchangeFailed("the answer is empty")
        except ExchangeFailed as exc:
            record.error = str(exc)
        record.end_s = time.perf_counter()

    async def tokens_per_word(self) -> float:
        """How many tokens a word of our prompts makes there.

        Raises:
            ExchangeFailed: the endpoint does not answer, or does not count.
        """
        counts = [await self._count_tokens(num_words) for num_words in _PROBE_WORDS]
        per_word = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
        if per_word <= 0:
            raise ExchangeFailed(
                f"{self.server.url} does not count prompt tokens in usage: say --tokens-per-word"
            )
        return per_word

    async def _count_tokens(self, num_words: int) -> int:
        body = self._body(probe_text(num_words, f"probe {num_words}"), 1, stream=False)
        async with aclosing(self.server.post(self._path, body)) as pieces:
            answer = b"".join([piece async for piece in pieces])
        try:
            usage = _decode(answer).usage
        except msgspec.DecodeError as exc:
            raise ExchangeFailed(f"the answer is no completion: {exc}") from exc
        return usage.prompt_tokens if usage else 0

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def _body(self, prompt: str, max_tokens: int, *, stream: bool) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignores_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body)

    async def _events(self, body: bytes) -> AsyncGenerator[_Event, None]:
        held = b""
        async with aclosing(self.server.post(self._path, body)) as pieces:
            async for piece in pieces:
                *lines, held = (held + piece).split(b"\n")
                for line in lines:
                    payload = line.strip().removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and payload != b"[DONE]":
                        yield _understood(payload)


def _understood(payload: bytes) -> _Event:
    try:
        event = _decode(payload)
    except msgspec.DecodeError as exc:
        raise ExchangeFailed(f"an event is no chunk of a completion: {exc}") from exc
    if event.error is not None:
        raise ExchangeFailed(str(event.error.get("message", event.error)))
    return event


def _note(event: _Event, record: Record) -> None:
    if any(choice.shows_something for choice in event.choices):
        record.piece_times_s.append(time.perf_counter())
    if event.usage is not None:
        record.num_input = event.usage.prompt_tokens
        record.num_output = event.usage.completion_tokens
        details = event.usage.prompt_tokens_details or {}
        record.num_cached = details.get("cached_tokens") or 0
