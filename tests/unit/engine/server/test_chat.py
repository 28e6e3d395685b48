"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

import pytest
from support.asgi import AsgiClient
from support.fake_engine import EOS, FakeEngine, text_script

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(text_script("tea?"))


def test_answers_in_openais_form(client: AsgiClient, engine: FakeEngine) -> None:
    answer = client.post(PATH, model="fake", messages=[USER]).json()
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "chatcmpl-req-1",
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "tea?", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 24,
            "completion_tokens": 5,
            "total_tokens": 29,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert bytes(engine.seen[0].prompt_token_ids) == b"<|user|>hi\n<|assistant|>"


def test_streams_the_role_first(client: AsgiClient) -> None:
    chunks = client.stream(PATH, messages=[USER])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas] == ["", "t", "e", "a", "?", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]


def test_generates_up_to_the_contexts_end_by_default(
    client: AsgiClient, engine: FakeEngine
) -> None:
    client.post(PATH, messages=[USER])
    assert engine.seen[0].sampling.max_tokens == 256 - 24


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_limit_fields_bound_the_output(client: AsgiClient, field: str) -> None:
    choice = client.post(PATH, messages=[USER], **{field: 2}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("te", "length")


def test_logprobs(client: AsgiClient) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    expected = {
        "content": [
            {
                "token": "t",
                "logprob": -0.5,
                "bytes": [116],
                "top_logprobs": [{"token": "t", "logprob": -0.5, "bytes": [116]}],
            }
        ]
    }
    whole = client.post(PATH, messages=[USER], **fields).json()
    assert whole["choices"][0]["logprobs"] == expected
    chunks = client.stream(PATH, messages=[USER], **fields)
    assert chunks[1]["choices"][0]["logprobs"] == expected


def test_content_in_parts(client: AsgiClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    client.post(PATH, messages=[{"role": "user", "content": parts}])
    assert bytes(engine.seen[0].prompt_token_ids) == b"<|user|>h\ni\n<|assistant|>"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_billing_line_of_instructions_is_dropped(
    client: AsgiClient, engine: FakeEngine, role: str
) -> None:
    billing, rest = "x-anthropic-billing-header: cch=1;", "You make tea.\nBe brief."
    parts = [{"type": "text", "text": text} for text in (billing, rest)]
    for content in (f"{billing}\n{rest}", parts):
        client.post(PATH, messages=[{"role": role, "content": content}, USER])
    client.post(PATH, messages=[{"role": "user", "content": billing}])
    *prompts, last = (bytes(seen.prompt_token_ids).decode() for seen in engine.seen)
    assert prompts == [f"<|system|>{rest}\n<|user|>hi\n<|assistant|>"] * 2
    assert last == f"<|user|>{billing}\n<|assistant|>"


def test_developer_is_system(client: AsgiClient, engine: FakeEngine) -> None:
    client.post(PATH, messages=[{"role": "developer", "content": "be"}, USER])
    assert bytes(engine.seen[0].prompt_token_ids).startswith(b"<|system|>be\n<|user|>hi\n")


def test_an_earlier_answer_can_be_sent_back_unchanged(client: AsgiClient) -> None:
    earlier = {
        "role": "assistant",
        "content": "tea?",
        "refusal": None,
        "audio": None,
        "tool_calls": None,
        "function_call": None,
        "annotations": None,
    }
    assert client.post(PATH, messages=[USER, earlier, USER]).status_code == 200


@pytest.mark.parametrize(
    ("earlier", "shown"),
    [
        ({"content": "tea?", "annotations": [], "audio": {"id": "a"}}, "tea?"),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}, "tea?"]}, "No.\ntea?"),
        ({"content": [{"type": "input_text", "text": "Tea?", "annotations": []}]}, "Tea?"),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                    {"type": "output_text", "text": "Yes."},
                ]
            },
            "Hm.\nYes.",
        ),
    ],
)
def test_an_answer_of_another_server_can_be_sent_back(
    client: AsgiClient, engine: FakeEngine, earlier: dict[str, Any], shown: str
) -> None:
    answer = client.post(PATH, messages=[{"role": "assistant", **earlier}, USER])
    assert answer.status_code == 200, answer.text
    prompt = bytes(engine.seen[0].prompt_token_ids).decode()
    assert prompt == f"<|assistant|>{shown}\n<|user|>hi\n<|assistant|>"


def test_continues_the_final_message(client: AsgiClient, engine: FakeEngine) -> None:
    started = {"role": "assistant", "content": "I would like "}
    client.post(PATH, messages=[USER, started], continue_final_message=True)
    assert bytes(engine.seen[0].prompt_token_ids).endswith(b"<|assistant|>I would like ")


def test_token_ids_if_requested(client: AsgiClient) -> None:
    prompt = list(b"<|user|>hi\n<|assistant|>")
    whole = client.post(PATH, messages=[USER], return_token_ids=True).json()
    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == [*b"tea?", EOS]
    chunks = client.stream(PATH, messages=[USER], return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == prompt
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == [*b"tea?", EOS]


def test_a_stop_string_is_the_stop_reason(client: AsgiClient) -> None:
    choice = client.post(PATH, messages=[USER], stop=["?", "a"]).json()["choices"][0]
    assert choice["message"]["content"] == "te"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "a")


def test_fields_for_accounts_have_no_effect(client: AsgiClient) -> None:
    hints = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    defaults = {"metadata": {"a": "b", "run": 7}, "service_tier": "auto", "modalities": ["text"]}
    assert client.post(PATH, messages=[USER], store=False, **hints, **defaults).status_code == 200


def test_null_is_the_default_within_objects_too(client: AsgiClient) -> None:
    unset = {"include_usage": None, "continuous_usage_stats": None}
    chunks = client.stream(PATH, messages=[USER], stream_options=unset)
    assert not any("usage" in chunk for chunk in chunks)
    counted = client.stream(PATH, messages=[USER], stream_options=unset | {"include_usage": True})
    assert counted[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("more", [{}, {"client_tag": 1.0}])
def test_integers_may_be_written_as_floats(
    client: AsgiClient, engine: FakeEngine, more: dict[str, Any]
) -> None:
    body = {"max_tokens": 2.0, "top_k": 40.0, "temperature": 1.0, "logit_bias": {"5": 1.0}, **more}
    answer = client.post(PATH, messages=[USER], **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "te"
    assert engine.seen[0].sampling.top_k == 40
    for value in (2.5, 1e300):
        refused = client.post(PATH, messages=[USER], max_tokens=value, **more)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_unsupported_behaviour_is_rejected(client: AsgiClient) -> None:
    for name, value in (("store", True), ("modalities", ["audio"])):
        answer = client.post(PATH, messages=[USER], **{name: value})
        assert answer.status_code == 400
        assert name in answer.json()["error"]["param"]


def test_an_invalid_limit_is_rejected_under_the_name_it_was_sent_with(client: AsgiClient) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.post(PATH, messages=[USER], **{name: 0})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_nesting_too_deep_for_the_template_is_a_400(client: AsgiClient) -> None:
    nested: dict[str, Any] = {}
    for _ in range(450):
        nested = {"a": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    answer = client.post(PATH, messages=[USER], tools=[tool])
    assert answer.status_code == 400
