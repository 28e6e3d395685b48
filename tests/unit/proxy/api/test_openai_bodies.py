"""Answers of P as stream chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mooncake_proxy.api.openai_bodies import (
    OpenAIEndpoint,
    answer_decoder,
    first_token_events,
    parse_request,
)
from mooncake_proxy.errors import BadRequest


@pytest.mark.parametrize("content", ["a", ""], ids=["text", "no text yet"])
def test_first_token_keeps_its_log_probabilities(content: str) -> None:
    """A token that starts a tool call has log probabilities, but no text."""
    parsed, _ = parse_request(b'{"messages":[],"logprobs":true,"stream":true}')
    logprobs: dict[str, Any] = {"content": [{"token": "<tool_call>", "logprob": -0.5}]}
    choice = {"index": 0, "message": {"role": "assistant", "content": content}}
    answer = {"id": "chatcmpl-1", "choices": [choice | {"logprobs": logprobs}]}
    events = first_token_events(
        OpenAIEndpoint.CHAT, answer_decoder.decode(json.dumps(answer)), parsed
    )
    chunks = [json.loads(event[6:]) for event in events.split(b"\n\n") if event]
    role, first = [choice for chunk in chunks for choice in chunk["choices"]]
    assert (role["delta"]["role"], role["logprobs"]) == ("assistant", None)
    assert (first["delta"].get("content", ""), first["logprobs"]) == (content, logprobs)


def test_integers_may_be_written_as_floats() -> None:
    parsed, fields = parse_request(b'{"prompt": "a", "max_tokens": 2.0, "n": 1.0, "top_p": 1.0}')
    assert (parsed.max_tokens, parsed.n) == (2, 1)
    assert {name: bytes(fields[name]) for name in ("max_tokens", "prompt", "top_p")} == {
        "max_tokens": b"2",
        "prompt": b'"a"',
        "top_p": b"1.0",
    }
    for value in (b"2.5", b"1e300", b'"2"'):
        with pytest.raises(BadRequest, match="max_tokens: expected `int") as refused:
            parse_request(b'{"prompt": "a", "max_tokens": %b}' % value)
        assert refused.value.param == "max_tokens"
    with pytest.raises(BadRequest):
        parse_request(b'{"max_tokens": 2.0, "prompt": }')
