"""Long work runs in threads, so that the server answers other requests meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_engine import FakeEngine

from mooncake_engine.errors import PromptTooLong
from mooncake_engine.server.app import create_app
from mooncake_engine.server.input_processor import check_chat_size
from mooncake_engine.server.openai_protocol import ChatRequest
from mooncake_engine.text.background_work import LONG_TEXT
from mooncake_engine.text.grammars import Vocabulary
from mooncake_engine.text.tokenizer import Tokenizer

LONG = "tea " * 10_000


class Held:
    """Wraps a method that blocks until other requests have been answered."""

    def __init__(self, method: Any) -> None:
        self._method = method
        self.is_reached = threading.Event()
        self.may_continue = threading.Event()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.is_reached.set()
        assert self.may_continue.wait(30), "no other request was answered meanwhile"
        return self._method(*args, **options)


def check_others_are_answered(app: Any, held: Held, path: str, body: dict[str, Any]) -> None:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            slow = asyncio.create_task(client.post(path, content=json.dumps(body)))
            assert await asyncio.to_thread(held.is_reached.wait, 30)
            assert (await client.get("/health")).status_code == 200
            quick = await client.post("/v1/completions", json={"prompt": "tea"})
            assert quick.status_code == 200
            held.may_continue.set()
            return await slow

    assert asyncio.run(scenario()).status_code in (200, 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": ["tea " * 1000] * 10}),
        ("/tokenize", {"prompt": LONG}),
    ],
    ids=["one prompt", "messages", "many prompts", "tokenize"],
)
def test_long_texts_are_tokenised_in_a_thread(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    encode = byte_tokenizer.encode
    held = Held(encode)

    def encode_or_wait(text: str, **options: Any) -> tuple[int, ...]:
        return held(text, **options) if len(text) > 100 else encode(text, **options)

    monkeypatch.setattr(byte_tokenizer, "encode", encode_or_wait)
    check_others_are_answered(create_app(FakeEngine(), byte_tokenizer), held, path, body)


CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
LONG_CALL = {"id": "c", "function": {"name": LONG, "arguments": "{}"}}
LONG_CHATS: dict[str, dict[str, Any]] = {
    "name": {"messages": [{"role": "user", "content": "a", "name": LONG}]},
    "result": {"messages": [{"role": "tool", "content": "a", "tool_call_id": LONG}]},
    "call": {"messages": [{"role": "assistant", "tool_calls": [LONG_CALL]}]},
    "id": {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": LONG}]}]},
    "many calls": {"messages": [{"role": "assistant", "tool_calls": [CALL] * 2000}]},
    "variables": {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"about": LONG},
    },
}


@pytest.mark.parametrize("what", LONG_CHATS)
def test_any_part_of_a_chat_makes_it_long(what: str) -> None:
    request = msgspec.convert(LONG_CHATS[what], ChatRequest)
    assert check_chat_size(request, FakeEngine().info) > LONG_TEXT


def test_calls_that_can_not_fit_are_refused_before_they_are_rendered() -> None:
    message = {"role": "assistant", "tool_calls": [CALL] * 100_000}
    request = msgspec.convert({"messages": [message]}, ChatRequest)
    with pytest.raises(PromptTooLong, match=r"characters > \d+ maximum; shorten messages"):
        check_chat_size(request, FakeEngine().info)


@pytest.mark.parametrize("what", ["prompt_logprobs", "logprobs"])
def test_others_are_answered_while_log_probabilities_are_encoded(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """With 20 per token, those of a long prompt take seconds."""
    named: list[int] = []
    begun = asyncio.Event()
    token_bytes = byte_tokenizer.token_bytes

    def name(token_id: int) -> bytes:
        named.append(token_id)
        begun.set()
        return token_bytes(token_id)

    monkeypatch.setattr(byte_tokenizer, "token_bytes", name)
    app = create_app(FakeEngine(), byte_tokenizer)
    body = {"prompt": "tea " * 50, what: 5}

    async def scenario() -> tuple[int, httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            slow = asyncio.create_task(client.post("/v1/completions", json=body))
            await begun.wait()
            at_first = len(named)
            return at_first, await slow

    at_first, response = asyncio.run(scenario())
    assert response.status_code == 200
    assert at_first < len(named) / 4


def test_grammars_are_compiled_in_a_thread(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(Vocabulary.matcher)
    monkeypatch.setattr(Vocabulary, "matcher", lambda *args: held(*args))
    body = {"prompt": "tea", "structured_outputs": {"regex": "(not known|to anybody)"}}
    app = create_app(FakeEngine(), byte_tokenizer)
    check_others_are_answered(app, held, "/v1/completions", body)
