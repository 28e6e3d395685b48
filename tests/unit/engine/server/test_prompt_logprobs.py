"""What the API returns about a prompt: echo, log probabilities, and the prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
from support.asgi import AsgiClient
from support.fake_engine import FakeEngine

COMPLETIONS = "/v1/completions"


def test_echo_with_logprobs_covers_prompt_and_answer(client: AsgiClient) -> None:
    choice = client.post(COMPLETIONS, prompt="tea", echo=True, logprobs=1).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "teaTEA"
    assert logprobs["tokens"] == [*"teaTEA", "<|eos|>"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][:2] == [None, {"e": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5, 6]


def test_offsets_count_characters_of_the_prompt(client: AsgiClient) -> None:
    choice = client.post(COMPLETIONS, prompt="aé", echo=True, logprobs=0, max_tokens=1).json()
    assert choice["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize("prompt", ["t", "tea", ["tea", "no"]])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_has_the_same_log_probabilities(
    client: AsgiClient, prompt: Any, logprobs: int | None
) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": logprobs}
    whole = client.post(COMPLETIONS, **body).json()["choices"]
    for expected in whole:
        streamed = [
            chunk["choices"][0]
            for chunk in client.stream(COMPLETIONS, **body)
            if chunk["choices"][0]["index"] == expected["index"]
        ]
        assert "".join(choice["text"] for choice in streamed) == expected["text"]
        for name, values in (expected["logprobs"] or {}).items():
            assert [v for choice in streamed for v in choice["logprobs"][name]] == values


def test_prompt_logprobs_in_vllms_form(client: AsgiClient, engine: FakeEngine) -> None:
    choice = client.post(COMPLETIONS, prompt="tea", prompt_logprobs=2).json()["choices"][0]
    assert engine.seen[0].sampling.prompt_logprobs == 2
    assert choice["text"] == "TEA"
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] == [
        None,
        {
            "101": {"logprob": -0.5, "rank": 1, "decoded_token": "e"},
            "102": {"logprob": -1.5, "rank": 2, "decoded_token": "f"},
        },
        {
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
        },
    ]


def test_prompt_logprobs_of_a_conversation(client: AsgiClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = client.post("/v1/chat/completions", messages=messages, prompt_logprobs=0).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][:2] == [
        None,
        {"124": {"logprob": -0.5, "rank": 1, "decoded_token": "|"}},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_returns_only_the_prompt(client: AsgiClient, *, stream: bool) -> None:
    body = {"prompt": "tea", "echo": True, "logprobs": 0, "max_tokens": 0}
    if stream:
        chunks = client.stream(COMPLETIONS, **body, stream_options={"include_usage": True})
        [choice], usage = chunks[0]["choices"], chunks[-1]["usage"]
    else:
        answer = client.post(COMPLETIONS, **body).json()
        [choice], usage = answer["choices"], answer["usage"]
    assert choice["text"] == "tea"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert usage["completion_tokens"] == 0
