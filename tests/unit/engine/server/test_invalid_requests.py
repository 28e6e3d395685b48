"""An invalid request is rejected by field name, with the right status, in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from support.asgi import AsgiClient, ManualClient
from support.fake_engine import FakeEngine

from mooncake_engine.errors import ConfigError, EngineDead, Overloaded
from mooncake_engine.messages import FinishReason
from mooncake_engine.server.app import create_app
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.text.limits import longest_body
from mooncake_engine.text.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}

BOTH_WAYS = ("do_remote_decode", "do_remote_prefill")

CONTINUED: dict[str, Any] = {"prompt": "x", "stream": True, "generated_token_ids": [65, 66]}

COMPLETION_REFUSALS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "prompt", "prompt is required"),
    ({"prompt": "x", "temprature": 1}, "temprature", "did you mean temperature?"),
    ({"prompt": "x", "guided_json": {}}, "guided_json", "use structured_outputs"),
    ({"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "in [-1, 256]"),
    ({"prompt": "x", "truncate_prompt_tokens": 1025}, "truncate_prompt_tokens", "in [-1, 256]"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, "prompt", "prompt is empty"),
    ({"prompt": "x", "truncation_side": "top"}, "truncation_side", "invalid enum value 'top'"),
    ({"prompt": "x", **{f"zz{i}": i for i in range(33)}}, None, "more than 32 unknown fields"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "suffix is not supported by this server"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", "expected `float | null`, got `str`"),
    ({"prompt": "x", "temperature": -1}, "temperature", "must be in [0.0, 100.0], got -1"),
    ({"prompt": "x", "top_p": 0}, "top_p", "top_p must be in (0.0, 1.0], got 0"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens must be in [1,"),
    ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens 3"),
    ({"prompt": "x", "n": 0}, "n", "n must be in [1, 128], got 0"),
    ({"prompt": "x", "n": 2, "best_of": 1}, "best_of", "must be in [2, 128], got 1"),
    ({"prompt": "x", "n": 2, "best_of": 3, "stream": True}, "best_of", "can't be streamed"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search", "beam search is not supported"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
    (CONTINUED | {"stream": False}, "generated_token_ids", "send stream: true"),
    (CONTINUED | {"n": 2}, "generated_token_ids", "continue one answer, not 2"),
    (CONTINUED | {"prompt": ["x", "y"]}, "generated_token_ids", "continue one answer, not 2"),
    (CONTINUED | {"echo": True}, "generated_token_ids", "can't be combined with echo"),
    (CONTINUED | {"generated_token_ids": [258]}, "generated_token_ids", "in [0, 258), got 258"),
    (
        CONTINUED | {"generated_token_ids": [1] * 255},
        "generated_token_ids",
        "256 tokens > 255 maximum",
    ),
    (CONTINUED | {"generated_token_ids": ["x"]}, "generated_token_ids[0]", "expected `int`"),
    ({"prompt": "x", "timeout": 0}, "timeout", "a positive number of seconds up to 86400, got 0"),
    ({"prompt": "x", "timeout": 1e9}, "timeout", "up to 86400, got 1000000000.0"),
    ({"prompt": "x", "stop": ""}, "stop", "an empty string"),
    ({"prompt": "x", "stop": ["a"] * 65}, "stop", "at most 64 strings, got 65"),
    ({"prompt": "x", "stop_token_ids": [258]}, "stop_token_ids", "in [0, 258), got 258"),
    ({"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias", "in [0, 258), got 999"),
    ({"prompt": "x", "logit_bias": {"9": 101}}, "logit_bias", "in [-100, 100], got 101.0"),
    (
        {"prompt": "x", "n": 128, "logit_bias": {str(i): 0.5 for i in range(1025)}},
        "logit_bias",
        "at most 1024 tokens, got 1025",
    ),
    ({"prompt": "x", "bad_words": ["a", ""]}, "bad_words", "an empty string"),
    ({"prompt": "x", "bad_words": ["a", " "]}, "bad_words", "' ', which has no tokens"),
    ({"prompt": "x", "bad_words": ["a"] * 129}, "bad_words", "at most 128 strings, got 129"),
    ({"prompt": "x", "bad_words": ["a" * 9000]}, "bad_words", "at most 8192 characters together"),
    ({"prompt": "x", "bad_words": ["a" * 1025]}, "bad_words", "1024 tokens together"),
    ({"prompt": "x", "bad_words": "tea"}, "bad_words", "expected `array | null`, got `str`"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "is empty, so no token"),
    ({"prompt": "x", "allowed_token_ids": [-1]}, "allowed_token_ids", "in [0, 258), got -1"),
    ({"prompt": "x", "allowed_token_ids": [7, 258]}, "allowed_token_ids", "[0, 258), got 258"),
    ({"prompt": "x", "allowed_token_ids": [7] * 259}, "allowed_token_ids", "at most 258 ids"),
    (
        {"prompt": "x", "allowed_token_ids": [7, 8], "stop_token_ids": [7, 8], "min_tokens": 1},
        "min_tokens",
        "every token would end the output",
    ),
    ({"prompt": "x", "logit_bias": {"tea": 1}}, "logit_bias", "expected `int`, got `str`"),
    ({"prompt": "x", "stream_options": {}}, "stream_options", "needs stream: true"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
        "unknown field stream_options.usage",
    ),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "got a list of nothing"),
    ({"prompt": ["a", 1]}, "prompt", "got a list of int and str"),
    ({"prompt": [300]}, "prompt", "token ids in [0, 258), got 300"),
    ({"prompt": [-1]}, "prompt", "token ids in [0, 258), got -1"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts, got 1025"),
    ({"prompt": {"a": 1}}, "prompt", "expected `str | array`, got `object`"),
    (
        {"prompt": "x", "kv_transfer_params": {"do_remote_decode": 1}},
        "kv_transfer_params",
        "do_remote_decode must be true or false",
    ),
    (
        {
            "prompt": "x",
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True},
        },
        "kv_transfer_params",
        "exclude each other",
    ),
    (
        {"prompt": "x", "stream": True, "kv_transfer_params": {"do_remote_decode": True}},
        "stream",
        "needs stream: false",
    ),
    (
        {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True, "created": "now"}},
        "kv_transfer_params",
        "created must be a count",
    ),
    (
        {
            "prompt": "x",
            "n": 2,
            "kv_transfer_params": {"do_remote_prefill": True, "first_token_delivered": True},
        },
        "kv_transfer_params",
        "choices must have one entry for each of 2 answers",
    ),
    (
        {
            "prompt": "x",
            "n": 2,
            "kv_transfer_params": {"do_remote_prefill": True, "choices": [1, 2]},
        },
        "kv_transfer_params",
        "choices must hold objects",
    ),
]

CHAT_REFUSALS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": [{"role": "king"}]}, "messages[0].role", "'king'; wanted assistant, developer,"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "messages[0].role is required"),
    ({"messages": [{"role": "tool", "content": "1"}]}, "messages", "no tools here"),
    ({"messages": [USER], "tools": [{}]}, "tools[0].function", "tools[0].function is required"),
    ({"messages": [USER], "top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    (
        {"messages": [USER], "logprobs": True, "top_logprobs": 129},
        "top_logprobs",
        "top_logprobs must be in [0, 128], got 129",
    ),
    (
        {"messages": [USER], "max_completion_tokens": 2**40},
        "max_completion_tokens",
        "max_completion_tokens must be in [1, 2147483648]",
    ),
    (
        {"messages": [USER], "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
        "may not set 'tokenize'",
    ),
    (
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "exclude each other",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "invalid value 'image_url'; wanted text",
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [(COMPLETIONS, *case) for case in COMPLETION_REFUSALS]
    + [(CHAT, *case) for case in CHAT_REFUSALS],
)
def test_an_invalid_field_is_named(
    client: AsgiClient, engine: FakeEngine, path: str, body: Any, param: str, words: str
) -> None:
    response = client.post(path, **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert error["param"] == param
    assert engine.seen == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt":"\xff"}', b'{"prompt": NaN}'])
def test_a_body_that_is_not_a_json_object_is_rejected(client: AsgiClient, body: bytes) -> None:
    response = client.request("POST", COMPLETIONS, content=body)
    assert response.status_code == 400
    assert "the body must be a JSON object" in response.json()["error"]["message"]


def test_deeply_nested_body_is_rejected(client: AsgiClient) -> None:
    body = b'{"prompt":"x","kv_transfer_params":{"a":' + b"[" * 100_000
    assert client.request("POST", COMPLETIONS, content=body).status_code == 400


MALFORMED = {
    b"[" * 5000 + b"]" * 5000: "nested too deeply",
    b'"\xff"': "UTF-8",
    b"1e400": "number out of range",
    b"1" + b"0" * 5000: "integer value out of range",
    rb'"\ud800"': "input data was truncated",
}


@pytest.mark.parametrize("value", MALFORMED)
@pytest.mark.parametrize("field", ["nonsense", "metadata", "chat_template_kwargs"])
@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/responses", "/v1/messages"])
def test_malformed_value_of_any_field_is_rejected(
    client: AsgiClient, path: str, field: str, value: bytes
) -> None:
    """Also of one that the request's type does not declare, which is skipped unread at first."""
    body = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1'
    if path == "/v1/responses":
        body = b'{"input":"a"'
    content = body + b',"%b":%b}' % (field.encode(), value)
    response = client.request("POST", path, content=content)
    assert response.status_code == 400, response.text
    if field == "nonsense":
        assert MALFORMED[value] in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/abort"])
def test_a_body_too_large_is_413(client: AsgiClient, path: str) -> None:
    """The limit depends on the context's length: 256 tokens here."""
    limit = (8 << 20) + 6 * 65536
    response = client.request("POST", path, content=b" " * (limit + 1))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert f"larger than {limit} bytes (--max-body-bytes)" in response.text
    assert client.request("POST", path, content=b" " * limit).status_code == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/tokenize"])
def test_a_body_whose_length_is_too_large_is_413_before_any_of_it(
    client: AsgiClient, path: str
) -> None:
    for length in (b"1000000000000", b"0" * 5000 + b"1000000000000"):
        answer = asyncio.run(_answer_to_head(client, path, length))
        assert answer["status"] == 413


async def _answer_to_head(client: AsgiClient, path: str, length: bytes) -> dict[str, Any]:
    """The response's start to a client that sends only the head of a request."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("waited for the body")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = ManualClient(b"", path, [(b"content-length", length)]).scope
    await client.app(scope, receive, send)
    return sent[0]


def test_the_largest_body_can_be_set(engine: FakeEngine, byte_tokenizer: Tokenizer) -> None:
    client = AsgiClient(create_app(engine, byte_tokenizer, ServerOptions(max_body_bytes=100)))
    assert client.post(COMPLETIONS, prompt="x" * 50).status_code == 200
    assert client.post(COMPLETIONS, prompt="x" * 100).status_code == 413
    with pytest.raises(ConfigError, match="--max-body-bytes must be at least 1"):
        ServerOptions(max_body_bytes=0)


@pytest.mark.parametrize(
    ("max_model_len", "expected"),
    [(256, 8781824), (131_072, (8 << 20) + 6 * 32 * 131_072), (10_000_000, 64 << 20)],
)
def test_the_largest_body_goes_by_the_context(
    engine: FakeEngine, max_model_len: int, expected: int
) -> None:
    assert longest_body(replace(engine.info, max_model_len=max_model_len)) == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x" * 256}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 236}], "max_tokens": 1}),
    ],
)
def test_a_prompt_too_long_is_told_in_words_that_clients_look_for(
    client: AsgiClient, path: str, body: dict[str, Any]
) -> None:
    response = client.post(path, **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 256 tokens. ")
    assert re.search(r"prompt is too long: 25[68] tokens > 255 maximum", error["message"])


def test_another_model_is_404(client: AsgiClient) -> None:
    response = client.post(COMPLETIONS, model="other", prompt="x")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "the model 'other' is not served here; 'fake' is",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/no", 404, "Not Found: This instance generates text; its GET /openapi.json lists"),
        ("POST", "/v1/embeddings", 404, "Not Found: This instance generates text"),
        ("POST", "/chat/completions", 404, f"Not Found: did you mean {CHAT}?"),
        (
            "GET",
            "/tokenizer_info",
            404,
            "Not Found: start the instance with --enable-tokenizer-info-endpoint",
        ),
        ("GET", CHAT, 405, "Method Not Allowed: this path takes POST"),
    ],
)
def test_unknown_paths_and_methods_have_an_error_status(
    client: AsgiClient, method: str, path: str, status: int, words: str
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(f"{method} {path}: {words}")
    assert (status == 405) == (response.headers.get("allow") == "POST")


def test_overload_is_429_with_retry_after(client: AsgiClient, engine: FakeEngine) -> None:
    engine.refusal = Overloaded("1024 requests wait already")
    for stream in (False, True):
        response = client.post(COMPLETIONS, prompt="x", stream=stream)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["message"] == "1024 requests wait already"


def test_a_request_without_capacity_for_all_choices_is_rejected_whole(
    client: AsgiClient, engine: FakeEngine
) -> None:
    engine.room = 3
    response = client.post(COMPLETIONS, prompt=["x", "y"], n=2)
    assert response.status_code == 429
    assert not engine.seen
    assert client.post(COMPLETIONS, prompt=["x", "y", "z"]).status_code == 200


def test_a_dead_engine_is_503(client: AsgiClient, engine: FakeEngine) -> None:
    engine.refusal = EngineDead("the step loop ended")
    response = client.post(COMPLETIONS, prompt="x", stream=True)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"


def test_an_unexpected_error_is_500_and_logged(
    client: AsgiClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.refusal = ZeroDivisionError("surprise")
    response = client.post(COMPLETIONS, prompt="x")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "request req-1 failed" in caplog.text


def test_a_failure_before_the_first_token_has_its_status(
    client: AsgiClient, engine: FakeEngine
) -> None:
    engine.fail_at = 0
    for stream in (False, True):
        response = client.post(COMPLETIONS, prompt="x", stream=stream)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "bad luck"


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_grammar_that_fails_during_generation_is_a_client_error(
    client: AsgiClient, engine: FakeEngine, fail_at: int
) -> None:
    """Also after the first token: a status if the answer is complete, else a last event."""
    engine.fail_at, engine.fail_as = fail_at, FinishReason.GRAMMAR
    expected = {
        "message": "bad luck",
        "type": "invalid_request_error",
        "param": "response_format",
        "code": "grammar_failed",
    }
    response = client.post(COMPLETIONS, prompt="tea")
    assert response.status_code == 400
    assert response.json()["error"] == expected
    response = client.post(COMPLETIONS, prompt="tea", stream=True)
    assert response.status_code == (200 if fail_at else 400)
    *_, last = response.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"] == expected
    found = client.get("/metrics").text
    assert re.search(r'request_success_total{.*finished_reason="grammar".*} 2\.0', found)
    assert re.search(r'request_success_total{.*finished_reason="error".*} 0\.0', found)


def test_a_failure_after_the_first_token_ends_the_stream_without_done(
    client: AsgiClient, engine: FakeEngine
) -> None:
    engine.die_at = 1
    response = client.post(COMPLETIONS, prompt="tea", stream=True)
    assert response.status_code == 200
    *_, last = response.text.strip().split("\n\n")
    assert last == (
        'data: {"error":{"message":"the step loop ended: out of luck",'
        '"type":"server_error","param":null,"code":"engine_dead"}}'
    )


def test_one_failed_choice_aborts_its_siblings(client: AsgiClient, engine: FakeEngine) -> None:
    engine.die_at = 1
    assert client.post(COMPLETIONS, prompt="tea", n=3).status_code == 503
    assert sorted(engine.left_early) == ["req-1-0", "req-1-1", "req-1-2"]
