"""An answer continued in its middle, as behind a lost instance, is the answer without a gap."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.programs import TINY_LLAMA, serving

Json = dict[str, Any]
PAGE = (TINY_LLAMA / "page.txt").read_text()[:160]
COMPLETION: Json = {"prompt": PAGE, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
CHAT: Json = {
    "messages": [{"role": "user", "content": "Who lives in the wood?"}],
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 160,
}
COUNTED: Json = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
WEATHER: Json = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Kraków", "Rome"]}, "days": {"enum": [1, 22, 333]}},
        "required": ["town", "days"],
        "additionalProperties": False,
    },
}
SCHEMA: Json = {"name": "it", "schema": WEATHER["parameters"]}
REQUESTS: dict[str, Json] = {
    "greedy": COMPLETION | COUNTED,
    "seed": COMPLETION | {"temperature": 1.5, "seed": 7, "top_p": 0.9},
    "penalties": COMPLETION
    | {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3},
    "bad words": COMPLETION | {"bad_words": [" the", " was", "ing", " and a"]},
    "stop": COMPLETION | {"stop": [". ", " to"], "min_tokens": 9, "max_tokens": 60},
    "min tokens": COMPLETION
    | {"min_tokens": 16, "max_tokens": 40, "stop_token_ids": [*range(97, 123)], "temperature": 0.9}
    | {"seed": 11},
    "logprobs": COMPLETION | {"logprobs": 2},
    "regex": COMPLETION
    | {"structured_outputs": {"regex": "[a-z]{3}(-[0-9]{2}){4}é"}, "ignore_eos": False},
    "chat logprobs": CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 20},
    "json": CHAT | {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    "tools": CHAT
    | {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"}
    | {"logit_bias": {str(byte): -100 for byte in b" \n\r\t"}},
    "truncated": CHAT | {"truncate_prompt_tokens": 12, "max_tokens": 12, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--dtype", "float32", "--tool-call-parser", "hermes") as (url, _):
        yield url


def stream(url: str, body: Json) -> list[Json]:
    """The choices and usages of a stream's events, without ids and times."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = body | {"stream": True, "return_token_ids": True}
    response = httpx.post(url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    *events, last = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-1]]
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    for chunk in chunks:
        cached = (chunk.get("usage") or {}).pop("prompt_tokens_details", {"cached_tokens": 0})
        assert cached["cached_tokens"] <= len(PAGE) + 1
    return [{"choices": chunk["choices"], "usage": chunk.get("usage")} for chunk in chunks]


def token_ids(event: Json) -> list[int]:
    return [i for choice in event["choices"] for i in choice.get("token_ids", ())]


def comparable(part: Any) -> Any:
    """Part of an event without the ids of calls, which name the request, and with log
    probabilities as exact as batches of different shapes compute them."""
    if isinstance(part, dict):
        return {name: comparable(value) for name, value in part.items() if name != "id"}
    if isinstance(part, list):
        return [comparable(value) for value in part]
    return round(part, 3) if isinstance(part, float) else part


@pytest.mark.parametrize("name", list(REQUESTS))
def test_is_the_answer_without_a_gap(url: str, name: str) -> None:
    body = REQUESTS[name]
    whole = stream(url, body)
    number = sum(map(len, map(token_ids, whole)))
    assert number > 8
    for known in sorted({1, 2, number // 3, number // 2, number - 2, number - 1}):
        generated: list[int] = []
        events = list(whole)
        while len(generated) < known:
            generated += token_ids(events.pop(0))
        limits = {"max_tokens": body["max_tokens"] - known}
        if "min_tokens" in body:
            limits["min_tokens"] = max(0, body["min_tokens"] - known)
        rest = stream(url, body | limits | {"generated_token_ids": generated})
        assert comparable(rest) == comparable(events)


def test_tools_are_called_with_an_argument_cut_in_two(url: str) -> None:
    """The test of all requests would not notice a parser that finds no calls."""
    events = stream(url, REQUESTS["tools"])
    calls = [c for e in events for x in e["choices"] for c in x["delta"].get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments).keys() == {"town", "days"}
    assert len(calls) > 4
