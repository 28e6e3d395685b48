"""Unknown request fields: ignored with one warning, or rejected if they change the answer."""

from __future__ import annotations

import difflib
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.asgi import AsgiClient

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.server import unknown_fields
from mooncake_engine.server.input_processor import render_chat
from mooncake_engine.server.openai_protocol import (
    ChatRequest,
    CompletionRequest,
    StructuredOutputs,
    decode_request,
)
from mooncake_engine.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown_fields, "_warned", set())


AGENTS_BODY = {
    "model": "m",
    "messages": [
        {"role": "user", "content": "a", "cache_control": {"type": "ephemeral"}},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "b", "cache_control": {}}],
            "provider_specific_fields": None,
            "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": "{}"}, "extra_content": {}}
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "c", "annotations": []}]},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {}}],
    "service_tier": "flex",
    "verbosity": "low",
    "prompt_cache_retention": "24h",
    "litellm_call_id": "x",
    "logit_bias": {"5": 1},
}


def test_fields_that_agents_send_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = decode_request(json.dumps(AGENTS_BODY).encode(), ChatRequest)
        decode_request(json.dumps(AGENTS_BODY).encode(), ChatRequest)
    assert [message.role for message in found.messages] == ["user", "assistant", "user"]
    assert found.logit_bias == {5: 1}
    assert found.tools is not None
    names = sorted(record.getMessage().split("'")[1] for record in caplog.records)
    assert names == ["litellm_call_id", "prompt_cache_retention"]


def test_the_number_of_warnings_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for i in range(300):
            decode_request(b'{"prompt": "x", "qq%d": 1}' % i, CompletionRequest)
    assert len(caplog.records) == 256


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("temprature", "unknown field temprature; did you mean temperature?"),
        ("max_token", "did you mean max_tokens?"),
        ("guided_regex", "guided_regex is not supported: use structured_outputs"),
        ("mirostat", "mirostat is not supported; remove it"),
    ],
)
def test_fields_that_change_the_answer_are_rejected(field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        decode_request(json.dumps({"prompt": "x", "abc": 1, field: 1}).encode(), CompletionRequest)
    assert caught.value.param == field


def test_long_names_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of megabytes would take seconds."""
    compared: list[str] = []

    def note(word: str, *_: Any, **__: Any) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", note)
    for name in ("q" * 64, "q" * 65):
        decode_request(json.dumps({"prompt": "x", name: 1}).encode(), CompletionRequest)
    assert compared == ["q" * 64]


CHANGED_ANSWERS = [
    ("use_beam_search", True, "remove it", False),
    ("num_beams", 4, "remove it", 1),
    ("no_repeat_ngram_size", 3, "remove it", 0),
    ("echo", True, "remove it", False),
    ("suffix", "y", "remove it", None),
    ("stop_regex", "x", "remove it", None),
    ("structural_tag", "x", "remove it", None),
    ("spaces_between_special_tokens", False, "remove it", True),
    ("best_of", 4, "use n", 1),
    ("do_sample", False, "use temperature", True),
    ("stop_sequences", ["x"], "use stop", []),
    ("reasoning", {"effort": "high"}, "use reasoning_effort", None),
    ("n_predict", 5, "use max_tokens", None),
    ("length_penalty", 0.5, "use best_of", 1),
    ("logits_processors", ["x"], "remove it", []),
    ("vllm_xargs", {"x": 1}, "remove it", {}),
    ("return_token_offsets", True, "remove it", False),
    ("watermarking", True, "remove it", False),
    ("repetition_detection", {"min_count": 3}, "remove it", None),
    ("logprob_token_ids", [1], "remove it", None),
]


@pytest.mark.parametrize(("field", "value", "reason", "neutral"), CHANGED_ANSWERS)
def test_fields_are_rejected_unless_they_have_no_effect(
    field: str, value: Any, reason: str, neutral: Any
) -> None:
    """Clients that send every parameter send values without effect, too."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(InvalidRequest, match=f"{field} is not supported.*{reason}") as caught:
        decode_request(json.dumps(body | {field: value}).encode(), ChatRequest)
    assert caught.value.param == field
    for harmless in (neutral, None):
        decode_request(json.dumps(body | {field: harmless}).encode(), ChatRequest)


def test_other_objects_stay_strict() -> None:
    body = b'{"prompt": "x", "structured_outputs": {"jsn": {}}}'
    with pytest.raises(InvalidRequest, match=r"unknown field structured_outputs\.jsn; remove it"):
        decode_request(body, CompletionRequest)


NULLS = (
    *("frequency_penalty", "logit_bias", "presence_penalty", "response_format", "seed"),
    *("stream_options", "temperature", "top_p", "user", "top_k", "min_p", "repetition_penalty"),
    *("watermarking", "skip_special_tokens", "truncate_prompt_tokens", "truncation_side"),
    *("prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "structured_outputs"),
    *("session_id", "return_tokens_as_token_ids", "return_token_ids", "return_token_offsets"),
    *("return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
    *("repetition_detection", "stream_interval", "thinking_token_budget"),
)
VLLM_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(NULLS),
    **{"n": 1, "stop": [], "stream": False, "use_beam_search": False, "length_penalty": 1.0},
    **{"stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False},
    **{"min_tokens": 0, "spaces_between_special_tokens": True, "bad_words": [], "echo": False},
    **{"add_special_tokens": False, "priority": 0, "request_id": "abc", "mm_payload": "none"},
    **{"return_weight_versions": False, "routed_experts_prompt_start": 0},
}
"""The fields that completions and chat completions of vLLM 0.33 share, at their defaults."""
CHAT_NULLS = (
    *("max_tokens", "max_completion_tokens", "tools", "reasoning_effort", "documents"),
    *("chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
    "return_prompt_text",
)
VLLM_CHAT_DEFAULTS = {
    **dict.fromkeys(CHAT_NULLS),
    **{"logprobs": False, "top_logprobs": 0, "tool_choice": "none", "include_reasoning": True},
    **{"parallel_tool_calls": True, "add_generation_prompt": True},
    **{"continue_final_message": False},
}


def test_every_parameter_of_vllm_at_its_default_is_accepted(client: AsgiClient) -> None:
    """As programs send them that were written for its request types."""
    nulls = dict.fromkeys(("suffix", "logprobs", "prompt_embeds"))
    response = client.post("/v1/completions", prompt="x", **VLLM_DEFAULTS, **nulls, max_tokens=16)
    assert response.status_code == 200, response.text
    messages = [{"role": "user", "content": "x"}]
    body = VLLM_DEFAULTS | VLLM_CHAT_DEFAULTS
    response = client.post("/v1/chat/completions", messages=messages, **body)
    assert response.status_code == 200, response.text
    ignored = {f"tag {number}": number for number in range(28)}
    response = client.post("/v1/chat/completions", messages=messages, **body, **ignored)
    assert response.status_code == 200, "defaults don't count as unknown fields"
    ignored = {f"tag {number}": number for number in range(33)}
    response = client.post("/v1/chat/completions", messages=messages, **ignored)
    assert response.status_code == 400
    assert "more than 32 unknown fields" in response.text


def test_every_field_of_vllms_structured_outputs_is_accepted_at_its_default() -> None:
    """As its Python client sends them."""
    fields: dict[str, Any] = {
        **dict.fromkeys(("json", "regex", "choice", "grammar", "json_object")),
        **dict.fromkeys(("whitespace_pattern", "structural_tag")),
        **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), False),
    }
    wanted = {"prompt": "x", "structured_outputs": fields | {"regex": "a+"}}
    found = decode_request(json.dumps(wanted).encode(), CompletionRequest)
    assert found.structured_outputs == StructuredOutputs(regex="a+")
    for field in ("whitespace_pattern", "disable_any_whitespace"):
        wanted = {"prompt": "x", "structured_outputs": fields | {"regex": "a+", field: True}}
        with pytest.raises(InvalidRequest, match=rf"unknown field structured_outputs\.{field}"):
            decode_request(json.dumps(wanted).encode(), CompletionRequest)


def test_ignored_fields_cost_few_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each walks the whole body, which may have megabytes, while all other streams wait."""
    conversions: list[type] = []

    def count(body: Any, request_type: type, **options: Any) -> Any:
        conversions.append(request_type)
        return convert(body, request_type, **options)

    convert = msgspec.convert
    monkeypatch.setattr(msgspec, "convert", count)
    nulls = {f"null {number}": None for number in range(100)}
    body = {
        "messages": [{"role": "user", "content": "x", f"tag {i}": i} for i in range(100)],
        "stream_options": nulls,
        "structured_outputs": {"regex": "a", **nulls},
        **{f"tag {number}": number for number in range(32)},
    }
    decode_request(json.dumps(body).encode(), ChatRequest)
    assert len(conversions) == 3


def test_other_errors_are_found_beside_unknown_fields() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role: "):
        decode_request(b'{"abc": 1, "messages": [{"role": "x", "abc": 1}]}', ChatRequest)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ""),
        ({"reasoning_effort": "high"}, "high True"),
        ({"reasoning_effort": "none"}, "none False"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "low False",
        ),
    ],
)
def test_reasoning_effort_reaches_the_template(fields: dict[str, Any], shown: str) -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}"
    tokenizer = Tokenizer.load(Path("examples/tiny-llama"), template)
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    request = decode_request(json.dumps(body).encode(), ChatRequest)
    assert render_chat(request, tokenizer).strip() == shown
