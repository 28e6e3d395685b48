"""Requests of ``/v1/messages`` as chat requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mooncake_api import RequestRejected
from mooncake_api.api_formats import count_tokens_request
from mooncake_api.messages_request import read_messages_request

Json = dict[str, Any]
ASK: Json = {"role": "user", "content": "tea?"}
BREW: Json = {"name": "brew", "input_schema": {"type": "object"}, "cache_control": {"type": "x"}}
TEXT: Json = {"type": "text", "text": "te", "cache_control": {"type": "ephemeral"}}


def chat_of(**body: Any) -> Json:
    wanted = {"model": "m", "max_tokens": 9, "messages": [ASK]} | body
    _, chat = read_messages_request(json.dumps(wanted).encode())
    found: Json = json.loads(chat)
    return found


def test_a_text() -> None:
    assert chat_of() == {"model": "m", "max_tokens": 9, "messages": [ASK]}


def test_fields_are_renamed() -> None:
    chat = chat_of(
        stop_sequences=["er"],
        stream=True,
        temperature=0.5,
        thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {}}},
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        top_k=3,
    )
    del chat["messages"]
    assert chat == {
        "model": "m",
        "max_tokens": 9,
        "stop": ["er"],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5,
        "chat_template_kwargs": {"enable_thinking": True},
        "include_reasoning": False,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {}}},
        "user": "u",
        "top_k": 3,
    }


def test_thinking_is_a_variable_of_the_template_beside_the_clients_own() -> None:
    chat = chat_of(thinking={"type": "disabled"}, chat_template_kwargs={"a": 1})
    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "a": 1}


def test_a_conversation_with_calls_is_that_of_chat() -> None:
    messages = [
        {"role": "user", "content": [TEXT, {"type": "text", "text": "a?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "another server's"},
                {"type": "text", "text": "At once."},
                TEXT,
                {"type": "tool_use", "id": "c1", "name": "brew", "input": {"cups": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [TEXT, {"type": "text", "text": "a"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "c2"},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": "You make tea."},
        {"type": "text", "text": "Be brief."},
    ]
    call = {"name": "brew", "arguments": '{"cups":2}'}
    assert chat_of(system=system, messages=messages)["messages"] == [
        {"role": "system", "content": "You make tea.\n\nBe brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "te"}, {"type": "text", "text": "a?"}],
        },
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "At once."}, {"type": "text", "text": "te"}],
            "reasoning": "Hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "te\na"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "Well?"},
    ]


BILLING = "x-anthropic-billing-header: cch=1;"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{BILLING}\nYou make tea.\nBe brief.", "You make tea.\nBe brief."),
        ([{"type": "text", "text": BILLING}, TEXT, TEXT], "te\n\nte"),
        ([{"type": "text", "text": f"{BILLING}\nYou make tea."}, TEXT], "You make tea.\n\nte"),
        (BILLING, None),
        ([{"type": "text", "text": BILLING}], None),
    ],
)
def test_only_the_billing_line_of_instructions_is_dropped(
    content: Any, expected: str | None
) -> None:
    """They are the field ``system``, or a message between others."""
    found = [] if expected is None else [{"role": "system", "content": expected}]
    assert chat_of(system=content)["messages"] == [*found, ASK]
    messages = [ASK, {"role": "system", "content": content}]
    assert chat_of(messages=messages)["messages"] == [ASK, *found]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "brew"},
            {"tool_choice": {"type": "function", "function": {"name": "brew"}}},
        ),
    ],
)
def test_tools_and_their_choice(choice: Json, expected: Json) -> None:
    chat = chat_of(tools=[BREW], tool_choice=choice)
    function = {"name": "brew", "parameters": {"type": "object"}}
    assert chat.pop("tools") == [{"type": "function", "function": function}]
    assert {name: chat[name] for name in chat if "tool" in name} == expected


CONTINUED: Json = {"add_generation_prompt": False, "continue_final_message": True}
BEGUN: Json = {"role": "assistant", "content": "{"}


@pytest.mark.parametrize("content", ["{", "", [{"type": "text", "text": "{"}]])
def test_a_final_text_of_the_model_is_continued(content: Any) -> None:
    """Clients combine the two, mostly to get JSON."""
    messages = [ASK, {"role": "assistant", "content": content}]
    chat = chat_of(messages=messages)
    assert {name: chat[name] for name in CONTINUED} == CONTINUED
    assert chat["messages"][-1] == {"role": "assistant", "content": "{" if content else ""}
    counted = count_tokens_request(json.dumps({"messages": messages}).encode())
    assert json.loads(counted) == CONTINUED | {"messages": chat["messages"]}
    assert chat_of(messages=messages, add_generation_prompt=True)["add_generation_prompt"] is True


@pytest.mark.parametrize(
    "last",
    [
        ASK,
        {"role": "system", "content": "Well?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "At once."},
                {"type": "tool_use", "id": "c", "name": "brew", "input": {}},
            ],
        },
    ],
)
def test_nothing_else_is_continued(last: Json) -> None:
    assert not CONTINUED.keys() & chat_of(messages=[BEGUN, last]).keys()
    assert not CONTINUED.keys() & chat_of(messages=[BEGUN, ASK]).keys()


def test_count_tokens_renders_the_same_conversation() -> None:
    body = {"model": "m", "messages": [ASK], "system": "Be brief.", "tools": [BREW]}
    counted = json.loads(count_tokens_request(json.dumps(body).encode()))
    chat = chat_of(**body)
    assert counted == {name: chat[name] for name in ("model", "messages", "tools")}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "expected"),
        ({"container": "c"}, "container", "only text"),
        ({"mcp_servers": [{}]}, "mcp_servers", "yourself"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
            "shorten",
        ),
        ({"stop": ["a"]}, "stop", "stop_sequences"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]", "bash_20250124"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "list of blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
            "only text",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "document"}]}]},
            "messages[0].content[0]",
            "'document'",
        ),
        ({"system": [{"type": "image"}]}, "system[0]", "only text"),
        (
            {
                "messages": [ASK, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_config.format",
            "a whole answer",
        ),
    ],
)
def test_unsupported_fields_are_rejected_by_name(body: Json, param: str, words: str) -> None:
    with pytest.raises(RequestRejected, match=words) as info:
        chat_of(**body)
    assert info.value.param == param
