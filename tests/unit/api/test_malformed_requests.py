"""Whatever a request holds anywhere, it is rejected or becomes a chat request."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from mooncake_api import RequestRejected
from mooncake_api.api_formats import API_FORMATS, count_tokens_request

Json = dict[str, Any]
TEXT: Json = {"type": "text", "text": "te"}
BODIES: dict[str, Json] = {
    "/v1/responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "te"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
            {"type": "message", "role": "assistant", "content": "At once."},
            {"type": "function_call", "call_id": "c", "name": "brew", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
        "tools": [
            {"type": "function", "name": "brew", "parameters": {"type": "object"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "pour"}]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "brew"}]},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "stream": True,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "system": [TEXT],
        "messages": [
            {"role": "user", "content": [TEXT]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "s"},
                    TEXT,
                    {"type": "tool_use", "id": "c", "name": "brew", "input": {"cups": 2}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}],
            },
        ],
        "tools": [{"name": "brew", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low"},
        "chat_template_kwargs": {"a": 1},
        "context_management": {"edits": [{"type": "clear_thinking_1", "keep": "all"}]},
        "stream": True,
    },
}
ODD: list[Any] = [None, True, 0, -1.5, 10**30, "", "x", "\ud83c", [], [[]], [1], {}, {"type": []}]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position within a value, except the value itself."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in children:
        found.append((*path, key))
        if isinstance(child, dict | list):
            found += places(child, (*path, key))
    return found


def replaced(body: Json, place: tuple[Any, ...], value: Any) -> Json:
    changed = copy.deepcopy(body)
    holder: Any = changed
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return changed


@pytest.mark.parametrize("path", BODIES)
def test_any_value_in_any_place(path: str) -> None:
    num_taken = 0
    for place in places(BODIES[path]):
        for value in ODD:
            body = json.dumps(replaced(BODIES[path], place, value)).encode()
            try:
                translation = API_FORMATS[path].translate(body)
            except RequestRejected:
                continue
            num_taken += 1
            assert isinstance(json.loads(translation.chat_body)["messages"], list)
            translation.events(b'data: {"choices":[],"id":"chatcmpl-1"}\n\ndata: [DONE]\n\n')
    assert num_taken > 50


def test_any_value_in_a_count_request() -> None:
    body = {name: BODIES["/v1/messages"][name] for name in ("messages", "system", "tools")}
    for place in places(body):
        for value in ODD:
            try:
                counted = count_tokens_request(json.dumps(replaced(body, place, value)).encode())
            except RequestRejected:
                continue
            assert isinstance(json.loads(counted)["messages"], list)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("depth", [100, 400, 900, 990, 1000, 5000])
def test_deep_nesting_is_rejected(path: str, depth: int) -> None:
    body = json.dumps(BODIES[path] | {"tools": []})
    deep = "[" * depth + "]" * depth
    tool = '{"type":"function","name":"a","parameters":{"a":%s}}' % deep  # noqa: UP031
    if path == "/v1/messages":
        tool = '{"name":"a","input_schema":{"a":%s}}' % deep  # noqa: UP031
    data = body.replace('"tools": []', f'"tools": [{tool}]').encode()
    try:
        translation = API_FORMATS[path].translate(data)
    except RequestRejected:
        assert depth > 400
    else:
        assert translation.chat_body


@pytest.mark.parametrize("path", BODIES)
def test_any_chunk_of_a_stream(path: str) -> None:
    """Whatever an instance sends becomes events, an error event or nothing, but no exception."""
    call = {"index": 0, "id": "c", "function": {"name": "a", "arguments": "{"}}
    delta = {"content": "te", "reasoning": "Hm", "tool_calls": [call]}
    chunk: Json = {"id": "x", "choices": [{"delta": delta, "finish_reason": "stop"}]}
    drawn = random.Random(1)
    for place in places(chunk):
        for value in ODD:
            data = b"data: " + json.dumps(replaced(chunk, place, value)).encode() + b"\n\n"
            stream = data * drawn.choice((1, 2)) + b"data: [DONE]\n\n"
            translation = API_FORMATS[path].translate(json.dumps(BODIES[path]).encode())
            assert translation.events(stream)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_missing_field_is_named(path: str, field: str) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != field}
    with pytest.raises(RequestRejected, match=f"^{field} is required$") as rejection:
        API_FORMATS[path].translate(json.dumps(body).encode())
    assert rejection.value.param == field


def test_missing_field_is_named_with_its_path() -> None:
    body = {**BODIES["/v1/messages"], "thinking": {"budget_tokens": 9}}
    with pytest.raises(RequestRejected, match=r"^thinking\.type is required$"):
        API_FORMATS["/v1/messages"].translate(json.dumps(body).encode())


def test_value_that_is_not_listed_is_refused_with_the_list() -> None:
    body = {**BODIES["/v1/responses"], "text": {"format": {"type": "xml"}}}
    words = r"^text\.format\.type: invalid enum value 'xml'; wanted json_object, json_schema, text$"
    with pytest.raises(RequestRejected, match=words):
        API_FORMATS["/v1/responses"].translate(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "param", "message", "expected"),
    [
        ("/v1/responses", "max_tokens", "max_tokens must be", "max_output_tokens must be"),
        ("/v1/responses", "messages", "messages has 9 tokens", "input has 9 tokens"),
        ("/v1/responses", "response_format", "the JSON schema is", "the JSON schema is"),
        ("/v1/responses", "temperature", "temperature must be", "temperature must be"),
        ("/v1/messages", "stop", "stop must hold", "stop_sequences must hold"),
        ("/v1/messages", "max_tokens", "max_tokens must be", "max_tokens must be"),
    ],
)
def test_error_of_the_chat_request_names_the_clients_field(
    path: str, param: str, message: str, expected: str
) -> None:
    body = {"error": {"message": message, "type": "t", "param": param, "code": "c"}}
    translation = API_FORMATS[path].translate(json.dumps(BODIES[path]).encode())
    status, found = translation.complete(400, json.dumps(body).encode())
    error = json.loads(found)["error"]
    assert (status, error["message"]) == (400, expected)
    if path == "/v1/responses":
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] != param or param == "temperature"
