"""Requests that are too large or extreme are rejected before they cost time or memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.asgi import AsgiClient
from support.fake_engine import FakeEngine

from mooncake_engine.server import input_processor
from mooncake_engine.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HUGE = "x" * 70_000
USER = {"role": "user", "content": "hi"}


def tool(index: int, description: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{index}", "description": description}}


def refusal(client: AsgiClient, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, **body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": HUGE}, "prompt"),
        (COMPLETIONS, {"prompt": ["tea", HUGE]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
        (CHAT, {"messages": [USER] * 5000}, "messages"),
        (CHAT, {"messages": [USER], "tools": [tool(0, HUGE)]}, "tools"),
        ("/tokenize", {"prompt": HUGE}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": HUGE}]}, "messages"),
    ],
)
def test_texts_longer_than_any_context_are_not_tokenised(
    client: AsgiClient,
    byte_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    param: str,
) -> None:
    encode = byte_tokenizer.encode

    def encode_short(text: str, **options: Any) -> tuple[int, ...]:
        assert len(text) < 1000, "tokenised before its size was checked"
        return encode(text, **options)

    monkeypatch.setattr(byte_tokenizer, "encode", encode_short)
    error = refusal(client, path, **body)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)


def test_prompts_are_checked_one_by_one(
    client: AsgiClient, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = byte_tokenizer.encode

    def note(text: str, **options: Any) -> tuple[int, ...]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(byte_tokenizer, "encode", note)
    refusal(client, COMPLETIONS, prompt=["y" * 5000, "tea", "milk"])
    assert encoded == ["y" * 5000]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"repetition_penalty": 1e-40}, "repetition_penalty", "in [0.01, 100.0]"),
        ({"repetition_penalty": 0.0099}, "repetition_penalty", "in [0.01, 100.0]"),
        ({"stop": "x" * 9000}, "stop", "at most 8192 characters together, got 9000"),
        ({"stop": ["x" * 300] * 30}, "stop", "at most 8192 characters together, got 9000"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024 ids, got 1025"),
        (
            {"min_tokens": 2, "stop_token_ids": list(range(258))},
            "min_tokens",
            "every token would end",
        ),
        ({"prompt": ["tea"] * 1000, "n": 5}, "n", "at most 4096 choices, got 5000"),
    ],
)
def test_extreme_values_are_rejected(
    client: AsgiClient, engine: FakeEngine, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(client, COMPLETIONS, **{"prompt": "tea", **fields})
    assert error["param"] == param
    assert words in error["message"]
    assert engine.seen == []


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"stop": ["x" * 128] * 64},
        {"stop_token_ids": [1] * 1024},
        {"stop_token_ids": list(range(258)), "min_tokens": 0},
        {"min_tokens": 2, "stop_token_ids": list(range(200)), "max_tokens": 3},
    ],
)
def test_the_limits_of_each_range_are_accepted(client: AsgiClient, fields: dict[str, Any]) -> None:
    assert client.post(COMPLETIONS, prompt="tea", **fields).status_code == 200


def test_names_of_many_tools_are_compared_in_linear_time(client: AsgiClient) -> None:
    began = time.perf_counter()
    refusal(client, CHAT, messages=[USER], tools=[tool(i) for i in range(100_000)])
    assert time.perf_counter() - began < 20


def test_too_many_ids_are_not_detokenised(client: AsgiClient) -> None:
    error = refusal(client, "/detokenize", tokens=[1] * ((1 << 20) + 1))
    assert error["param"] == "tokens"
    assert "at most 1048576 ids" in error["message"]


def test_allowed_tokens_of_all_choices_are_bounded(
    client: AsgiClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each choice has its own copy of them in the core."""
    monkeypatch.setattr(input_processor, "_MAX_ALLOWED_TOKENS", 20)
    fields = {"prompt": ["tea", "milk"], "allowed_token_ids": [65, 66, 67, 68, 69]}
    error = refusal(client, COMPLETIONS, **fields, n=3)
    assert error["param"] == "allowed_token_ids"
    assert "got 5 ids for 6 choices" in error["message"]
    assert not engine.seen
    assert client.post(COMPLETIONS, **fields, n=2).status_code == 200
