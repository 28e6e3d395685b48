"""Requests of ``/v1/responses`` as chat requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mooncake_api import RequestRejected
from mooncake_api.responses_request import read_responses_request

Json = dict[str, Any]
BREW: Json = {"type": "function", "name": "brew", "parameters": {"type": "object"}, "strict": True}
POUR: Json = {"type": "function", "name": "pour", "description": "Pours."}


def chat_of(**body: Any) -> Json:
    _, chat = read_responses_request(json.dumps({"model": "m", "input": "tea?"} | body).encode())
    found: Json = json.loads(chat)
    return found


def test_a_text() -> None:
    assert chat_of() == {"model": "m", "messages": [{"role": "user", "content": "tea?"}]}


def test_fields_are_renamed() -> None:
    chat = chat_of(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        stream=True,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low", "format": {"type": "json_schema", "name": "a", "schema": {}}},
        top_logprobs=2,
        store=False,
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        client_metadata={"a": "b"},
        top_k=3,
    )
    del chat["messages"]
    assert chat == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        "logprobs": True,
        "top_logprobs": 2,
        "client_metadata": {"a": "b"},
        "top_k": 3,
    }


def test_a_conversation_with_calls_is_that_of_chat() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "te"}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "?"}],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "At once.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "brew", "arguments": "{}", "id": "fc"},
        {"type": "function_call", "call_id": "c2", "name": "pour", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [
                {"type": "input_text", "text": "spilt"},
                {"type": "input_text", "text": "cold"},
            ],
        },
        {"type": "reasoning", "summary": [], "encrypted_content": "another server's"},
        {"role": "assistant", "content": "Sorry."},
        {"role": "assistant", "content": "Really."},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "brew", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "pour", "arguments": "{}"}},
    ]
    assert chat_of(instructions="You make tea.", input=items)["messages"] == [
        {"role": "system", "content": "You make tea.\n\nBe brief."},
        {"role": "user", "content": "te"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}],
        },
        {"role": "assistant", "content": "At once.", "reasoning": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "spilt\ncold"},
        {"role": "assistant", "content": "Sorry."},
        {"role": "assistant", "content": "Really."},
    ]


def test_tools_and_their_choice() -> None:
    chat = chat_of(tools=[BREW, POUR], parallel_tool_calls=False, tool_choice="required")
    function = {"name": "brew", "parameters": {"type": "object"}, "strict": True}
    assert chat["tools"][0] == {"type": "function", "function": function}
    assert chat["tool_choice"] == "required"
    assert chat["parallel_tool_calls"] is False
    named = chat_of(tools=[BREW, POUR], tool_choice={"type": "function", "name": "pour"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "pour"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "pour"}]}
    chat = chat_of(tools=[BREW, POUR], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["pour"]
    assert chat["tool_choice"] == "required"


ALLOWED = {"type": "allowed_tools", "tools": [{"name": "pour"}]}


@pytest.mark.parametrize("tools", [None, [], [{"type": "web_search"}]])
@pytest.mark.parametrize("choice", ["auto", "none", ALLOWED, ALLOWED | {"mode": "auto"}])
def test_tool_choice_auto_is_dropped_without_tools(tools: Any, choice: Any) -> None:
    """As sent by an agent that summarises its conversation, or offers only web search."""
    chat = chat_of(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert not {"tools", "tool_choice"} & set(chat)


def test_what_belongs_to_a_dropped_web_search_is_dropped_too() -> None:
    search = {"type": "web_search_preview"}
    dropped = {"include": ["web_search_call.action.sources"], "tool_choice": search}
    assert chat_of(tools=[search], **dropped) == chat_of()
    assert chat_of(tools=[search, BREW], **dropped) == chat_of(tools=[BREW], tool_choice="auto")


def test_truncation() -> None:
    assert chat_of(truncation="auto")["truncate_prompt_tokens"] == -1
    assert chat_of(truncation="auto", truncate_prompt_tokens=9)["truncate_prompt_tokens"] == 9
    assert "truncate_prompt_tokens" not in chat_of(truncation=None)


def test_a_forced_call_without_tools_is_left_to_the_chat_endpoint() -> None:
    for choice in ("required", ALLOWED | {"mode": "required"}):
        assert chat_of(tools=[], tool_choice=choice)["tool_choice"] == "required"
    named = {"type": "function", "name": "pour"}
    assert chat_of(tool_choice=named)["tool_choice"]["function"] == {"name": "pour"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "responses are not stored"),
        ({"conversation": "c"}, "conversation", "responses are not stored"),
        ({"store": True}, "store", "responses are not stored"),
        ({"background": True}, "background", "background responses"),
        ({"prompt": {"id": "p"}}, "prompt", "instructions and input"),
        ({"truncation": "never"}, "truncation", "invalid"),
        ({"include": ["message.input_image.image_url"]}, "include", "input_image"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"n": 2}, "n", "several times"),
        ({"tools": [{"type": "mcp"}]}, "tools[0]", "mcp"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0]", "list of tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "mcp"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]", "item_reference"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "computer_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].arguments", "string"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "only text",
        ),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "list of parts"),
        ({"input": 5}, "input", "expected"),
        ({"temperature": "hot"}, "temperature", "expected"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
    ],
)
def test_unsupported_fields_are_rejected_by_name(body: Json, param: str, words: str) -> None:
    with pytest.raises(RequestRejected, match=words) as info:
        chat_of(**body)
    assert info.value.param == param


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"input": "\xff"}', b"[" * 2000])
def test_a_body_that_is_not_an_object_is_rejected(body: bytes) -> None:
    with pytest.raises(RequestRejected, match="JSON object"):
        read_responses_request(body)


def test_integers_may_be_written_as_floats() -> None:
    chat = chat_of(max_output_tokens=5.0, temperature=1.0, top_k=3.0)
    assert (chat["max_tokens"], chat["temperature"], chat["top_k"]) == (5, 1.0, 3.0)
    with pytest.raises(RequestRejected, match="max_output_tokens: expected `int"):
        chat_of(max_output_tokens=5.5)


def test_null_is_the_default() -> None:
    assert chat_of(previous_response_id=None, n=None, tools=None, store=None) == chat_of()


def test_namespaces_are_flattened_and_web_search_is_dropped() -> None:
    spawn = {"type": "function", "name": "spawn"}
    agents = {"type": "namespace", "name": "agents", "description": "", "tools": [spawn]}
    call = {"type": "function_call", "call_id": "c", "arguments": "{}", "name": "spawn"}
    chat = chat_of(
        tools=[agents, {"type": "web_search"}], input=[call | {"namespace": "agents"}, call]
    )
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["agents__spawn"]
    [message] = chat["messages"]
    names = [called["function"]["name"] for called in message["tool_calls"]]
    assert names == ["agents__spawn", "spawn"]
