"""Tools at the API: what the model receives, what it is forced to write, and its calls."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.asgi import AsgiClient
from support.byte_tokenizer import write_byte_tokenizer
from support.fake_engine import FakeEngine, text_script

from mooncake_engine.errors import ConfigError
from mooncake_engine.sampling_params import GrammarKind
from mooncake_engine.server.app import create_app
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
ASK = {"role": "user", "content": "tea?"}
# a shortened template of Qwen
TEMPLATE = (
    "{% if tools %}# Tools: <tool_call>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BREW: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "brew",
        "description": "Makes tea.",
        "parameters": {"type": "object", "properties": {"cups": {"$ref": "#/$defs/cups"}}}
        | {"$defs": {"cups": {"type": "integer"}}},
    },
}
POUR: dict[str, Any] = {"type": "function", "function": {"name": "pour"}}
CALL = '<tool_call>\n{"name": "brew", "arguments": {"cups": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tools")
    return Tokenizer.load(write_byte_tokenizer(directory, chat_template=TEMPLATE))


@pytest.fixture
def engine() -> FakeEngine:
    roomy = replace(FakeEngine().info, max_model_len=4096)
    return FakeEngine(text_script(f"At once.\n{CALL}"), info=roomy)


@pytest.fixture
def client(engine: FakeEngine, tokenizer: Tokenizer) -> AsgiClient:
    return AsgiClient(create_app(engine, tokenizer), {"X-Request-Id": "r"})


def ask(client: AsgiClient, **more: Any) -> Any:
    return client.post(PATH, messages=[ASK], tools=[BREW, POUR], **more)


def test_the_template_receives_the_tools(client: AsgiClient, engine: FakeEngine) -> None:
    assert ask(client).status_code == 200
    prompt = bytes(engine.seen[0].prompt_token_ids).decode()
    shown = [json.loads(line) for line in prompt.splitlines() if line.startswith("{")]
    assert shown == [BREW, POUR]
    assert engine.seen[0].sampling.grammar is None


def test_calls_of_a_complete_answer(client: AsgiClient) -> None:
    choice = ask(client).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function = {"name": "brew", "arguments": '{"cups": 2}'}
    assert choice["message"] == {
        "role": "assistant",
        "content": "At once.\n",
        "refusal": None,
        "tool_calls": [{"id": "call_r_0_0", "type": "function", "function": function}],
    }


def test_an_answer_of_calls_alone_has_no_content(client: AsgiClient, engine: FakeEngine) -> None:
    engine.script = text_script(CALL)
    assert ask(client).json()["choices"][0]["message"]["content"] is None


def test_calls_of_a_streamed_answer(client: AsgiClient) -> None:
    chunks = client.stream(PATH, messages=[ASK], tools=[BREW], return_token_ids=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "At once.\n"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["id"] == "call_r_0_0"
    assert calls[0]["function"]["name"] == "brew"
    assert all(call.keys() == {"index", "function"} for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"cups": 2}'
    assert len(calls) > 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


POURING = '<tool_call>\n{"name": "pour", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(("is_parallel", "names"), [(False, ["brew"]), (True, ["brew", "pour"])])
def test_without_parallel_calls_only_one_is_returned(
    client: AsgiClient, engine: FakeEngine, is_parallel: bool, names: list[str]
) -> None:
    """In complete and in streamed answers: the client would otherwise run several calls."""
    engine.script = text_script(f"At once.\n{CALL}\n{POURING}\nDone.")
    body = {"messages": [ASK], "tools": [BREW, POUR], "parallel_tool_calls": is_parallel}
    choice = client.post(PATH, **body).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == names
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"cups": 2}'
    assert choice["finish_reason"] == "tool_calls"
    chunks = [chunk["choices"][0] for chunk in client.stream(PATH, **body)]
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert [call["function"]["name"] for call in calls if "id" in call] == names
    assert {call["index"] for call in calls} == set(range(len(names)))
    first = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert "".join(first) == '{"cups": 2}'
    assert chunks[-1]["finish_reason"] == "tool_calls"
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    assert content == choice["message"]["content"] == "At once.\n\nDone."


@pytest.mark.parametrize("more", [{"tool_choice": "none"}, {"tools": None}])
def test_without_tools_calls_stay_text(
    client: AsgiClient, engine: FakeEngine, more: dict[str, Any]
) -> None:
    body = {"messages": [ASK], "tools": [BREW], **more}
    choice = client.post(PATH, **body).json()["choices"][0]
    assert choice["message"]["content"] == f"At once.\n{CALL}"
    assert choice["finish_reason"] == "stop"
    assert "# Tools" not in bytes(engine.seen[0].prompt_token_ids).decode()


def test_earlier_calls_and_results_go_back_to_the_model(
    client: AsgiClient, engine: FakeEngine
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "brew", "arguments": '{"a":1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "done", "tool_call_id": "c1"}
    response = client.post(PATH, messages=[ASK, called, result], tools=[BREW])
    assert response.status_code == 200, response.text
    prompt = bytes(engine.seen[0].prompt_token_ids).decode()
    assert '<|assistant|><tool_call>brew{"a": 1}</tool_call><|tool|>done(c1)' in prompt


def test_calls_in_openais_older_form_are_tool_calls(client: AsgiClient, engine: FakeEngine) -> None:
    call = {"name": "brew", "arguments": '{"a":1}'}
    called = {"role": "assistant", "content": None, "function_call": call}
    result = {"role": "function", "name": "brew", "content": "done"}
    unused = {"functions": [], "function_call": "none"}
    response = client.post(PATH, messages=[ASK, called, result], **unused)
    assert response.status_code == 200, response.text
    prompt = bytes(engine.seen[0].prompt_token_ids).decode()
    assert '<|assistant|><tool_call>brew{"a": 1}</tool_call><|tool|>done<|assistant|>' in prompt


@pytest.mark.parametrize(
    "arguments", ['{"a": True}', '{"a": "cut o', "[]", "null", "42", "", "[" * 2000]
)
def test_earlier_arguments_that_are_no_object_do_not_end_the_conversation(
    client: AsgiClient, engine: FakeEngine, arguments: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "brew", "arguments": arguments}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    response = client.post(PATH, messages=[ASK, called], tools=[BREW])
    assert response.status_code == 200, response.text
    assert b"<tool_call>brew{}</tool_call>" in bytes(engine.seen[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("choice", "rules"),
    [
        ("required", ["call: call_0 | call_1", 'calls: one ("\\n" one)*']),
        ({"type": "function", "function": {"name": "pour"}}, ["call: call_0\n", "calls: one\n"]),
    ],
)
def test_a_forced_call_becomes_a_grammar(
    client: AsgiClient, engine: FakeEngine, choice: Any, rules: list[str]
) -> None:
    response = ask(client, tool_choice=choice)
    assert response.status_code == 200, response.text
    grammar = engine.seen[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert all(rule in grammar.source for rule in rules), grammar.source


def test_an_answer_is_a_call_or_follows_its_schema(client: AsgiClient, engine: FakeEngine) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}
    assert ask(client, response_format=schema).status_code == 200
    grammar = engine.seen[0].sampling.grammar
    assert grammar is not None
    assert "start: calls | instead" in grammar.source


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": None, "tool_choice": "auto"}, "tool_choice needs tools"),
        ({"tools": [BREW, BREW]}, "unique names, got 'brew' 2 times"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "stir"}}},
            "'stir', which is not among the tools",
        ),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "have another structure",
        ),
        ({"structured_outputs": {"regex": "a"}}, "may only be a JSON schema"),
    ],
)
def test_invalid_tool_choices_are_rejected(
    client: AsgiClient, body: dict[str, Any], words: str
) -> None:
    response = client.post(PATH, **{"messages": [ASK], "tools": [BREW], **body})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_model_without_tools_rejects_them(engine: FakeEngine, byte_tokenizer: Tokenizer) -> None:
    client = AsgiClient(create_app(engine, byte_tokenizer))
    response = ask(client)
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]
    forced = ServerOptions(tool_call_parser="hermes")
    client = AsgiClient(create_app(engine, byte_tokenizer, forced))
    assert ask(client).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_an_unknown_format_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"one of auto, none, hermes, .*deepseek_v31, mistral, got 'x'"
    ):
        ServerOptions(tool_call_parser="x")


CODER_CALL = """<tool_call>
<function=brew>
<parameter=cups>
2
</parameter>
<parameter=kind>
green "A"
</parameter>
</function>
</tool_call>"""


@pytest.fixture
def coder(engine: FakeEngine, tokenizer: Tokenizer) -> AsgiClient:
    """A model that calls tools in Qwen3-Coder's format."""
    engine.script = text_script(f"At once.\n{CODER_CALL}")
    return AsgiClient(create_app(engine, tokenizer, ServerOptions("qwen3_coder")))


def test_untyped_arguments_get_the_types_of_the_schema(coder: AsgiClient) -> None:
    message = ask(coder).json()["choices"][0]["message"]
    assert message["content"] == "At once.\n"
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "brew", "arguments": '{"cups": 2, "kind": "green \\"A\\""}'}
    chunks = coder.stream(PATH, messages=[ASK], tools=[BREW])
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(c["function"]["arguments"] for c in calls) == call["function"]["arguments"]
    assert len(calls) > 8  # the string was streamed in parts
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_untyped_calls_are_text_where_no_tools_are_offered(coder: AsgiClient) -> None:
    choice = coder.post(PATH, messages=[ASK]).json()["choices"][0]
    assert choice["message"]["content"] == f"At once.\n{CODER_CALL}"
    assert choice["finish_reason"] == "stop"


FORCED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "brew",
        "parameters": {
            "properties": {
                "kind": {"type": "string"},
                "cups": {"$ref": "#/$defs/cups"},
                "milk": {"enum": ["no", "yes"]},
            },
            "required": ["kind"],
            "$defs": {"cups": {"type": "integer"}},
        },
    },
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"cups": {"type": "integer"}}, "required": True},
        {"properties": {"cups": {"type": "integer"}}, "required": None},
        {"properties": ["cups"]},
        {"properties": None},
        {"properties": {"cups": {"type": "string", "enum": None}}},
        {"properties": {"cups": {"type": "string", "enum": [None, 5]}}},
        {"properties": {"cups": {"type": None, "anyOf": None}}},
        {"properties": {"cups": None}},
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_odd_tool_schemas_fail_no_request(
    coder: AsgiClient, parameters: dict[str, Any], choice: str
) -> None:
    """Keywords without a value, as some clients write them, are ignored."""
    tool = {"type": "function", "function": {"name": "brew", "parameters": parameters}}
    response = coder.post(PATH, messages=[ASK], tools=[tool], tool_choice=choice)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["tool_calls"]


def test_building_a_grammar_stops_once_it_is_too_long(coder: AsgiClient) -> None:
    """Definitions are repeated per argument: tools of 60 KB would have a grammar of 36 MB."""
    parameters = {
        "properties": {f"a{i}": {"$ref": "#/$defs/a"} for i in range(1200)},
        "$defs": {"a": {"type": "integer", "description": "x" * 30_000}},
    }
    tool = {"type": "function", "function": {"name": "brew", "parameters": parameters}}
    tracemalloc.start()
    response = coder.post(PATH, messages=[ASK], tools=[tool], tool_choice="required")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert response.status_code == 400
    assert "has more than 524288 characters" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "tools"
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"kind": 'green <b>\n"A"'}, True),
        ({"kind": "", "cups": "2", "milk": "no"}, True),
        ({"kind": "x", "milk": "yes"}, True),
        ({"cups": "2"}, False),
        ({"kind": "x", "cups": "two"}, False),
        ({"kind": "x", "milk": "maybe"}, False),
        ({"kind": "x", "sugar": "1"}, False),
    ],
)
def test_a_forced_call_in_tags_follows_its_schema(
    coder: AsgiClient, engine: FakeEngine, arguments: dict[str, str], *, fits: bool
) -> None:
    assert coder.post(PATH, messages=[ASK], tools=[FORCED], tool_choice="required").is_success
    grammar = engine.seen[0].sampling.grammar
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar.source))
    lines = [f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in arguments.items()]
    text = f"<tool_call>\n<function=brew>\n{''.join(lines)}</function>\n</tool_call>".encode()
    assert (matcher.try_consume_tokens(list(text)) == len(text)) is fits
    assert not fits or matcher.is_accepting()


def test_calls_are_parsed_across_prefill_and_decode(client: AsgiClient, engine: FakeEngine) -> None:
    """The first token's output and the rest add up to the whole, even with a tag in between."""
    engine.script = text_script(CALL)
    ordered = {"do_remote_decode": True}
    prefilled = ask(client, max_tokens=1, kv_transfer_params=ordered).json()
    params = prefilled["kv_transfer_params"] | {
        "first_token_delivered": True,
        "last_token_id": CALL.encode()[0],
    }
    assert prefilled["choices"][0]["message"]["content"] == ""
    both = [BREW, POUR]
    chunks = client.stream(PATH, messages=[ASK], tools=both, kv_transfer_params=params)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not any(delta.get("content") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"cups": 2}'
