"""Tool calls found in text: well-formed ones are calls, everything else stays text."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings, strategies as st

from mooncake_engine.text.tool_calls import (
    PARSERS,
    HermesParser,
    Llama3Parser,
    ToolCallParser,
    detect_parser,
)

Calls = list[tuple[str, str]]


def parse(parser: ToolCallParser, *pieces: str) -> tuple[str, Calls]:
    """All content, and name and arguments of every call."""
    content, calls = "", []  # type: ignore[var-annotated]
    for parsed in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    return content, calls


TEA = '<tool_call>\n{"name": "brew", "arguments": {"cups": 2}}\n</tool_call>'
MILK = '<tool_call>{"name":"pour","arguments":{"what":"milk } \\" ]"}}</tool_call>'
HERMES = [
    ("no calls at all", "no calls at all", []),
    ("", "", []),
    (TEA, "", [("brew", '{"cups": 2}')]),
    (TEA.replace("{", " \n\n { "), "", [("brew", '{ "cups": 2}')]),
    (f"First:\n{TEA}", "First:\n", [("brew", '{"cups": 2}')]),
    (f"{TEA}\n{MILK}\n", "", [("brew", '{"cups": 2}'), ("pour", '{"what":"milk } \\" ]"}')]),
    (f"{TEA}\nDone.", "\nDone.", [("brew", '{"cups": 2}')]),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f\\u00e9", "arguments": {}}</tool_call>', "", [("fé", "{}")]),
    # malformed: text
    ("<tool_call>soon</tool_call>", "<tool_call>soon</tool_call>", []),
    ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ('<tool_call>{"name": 3, "arguments": {}}', '<tool_call>{"name": 3, "arguments": {}}', []),
    ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (f"<tool_call>oh\n{TEA}", "<tool_call>oh\n", [("brew", '{"cups": 2}')]),
    ("a <tool_ b", "a <tool_ b", []),
    ("a <tool_call", "a <tool_call", []),
    # malformed after the arguments have begun: the call keeps what was its own
    ('<tool_call>{"name": "f", "arguments": {"a": [1}', "}", [("f", '{"a": [1')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ('<tool_call>{"name": "f", "arguments": {}, "id": 7}', ', "id": 7}', [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}</tool', "</tool", [("f", "{}")]),
]
LLAMA = [
    ("no calls at all", "no calls at all", []),
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (' \n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        '{"name": "f", "parameters": {}}; {"name": "g", "arguments": {}}\n',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ('{"name": "f", "parameters": {}} as you like', " as you like", [("f", "{}")]),
    ('{"cups": 2}', '{"cups": 2}', []),
    ('{"cups": ', '{"cups": ', []),
    ('Well, {"name": "f", "parameters": {}}', 'Well, {"name": "f", "parameters": {}}', []),
    ("<|python", "<|python", []),
    ("  ", "  ", []),
]
CASES = [(HermesParser, *case) for case in HERMES] + [(Llama3Parser, *case) for case in LLAMA]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_tells_calls_from_text(
    kind: type[ToolCallParser], text: str, content: str, calls: Calls
) -> None:
    assert parse(kind(), text) == (content, calls)
    assert parse(kind(), *text) == (content, calls)


def test_arguments_arrive_as_they_are_written() -> None:
    parser = HermesParser()
    assert parser.push("So: <tool_").content == "So: "
    assert parser.push('call>{"name": "brew", "argu').calls == ()
    [named] = parser.push('ments": ').calls or parser.push("{").calls[:1]
    assert (named.index, named.name) == (0, "brew")
    assert [delta.arguments for delta in parser.push('"cups": 2').calls] == ['"cups": 2']


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", '{"name": "f", "arguments": {'),
    *('{"name": "f", "parameters": {"a": "', '"name": "g"', '"arguments": {', "{", "}", "[", "]"),
    *('"', "\\", ":", ",", ";", " ", "\n", "é", "}}</tool_call>", "}}"),
]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Pieces of calls in any order, with words that can be told apart among them."""
    fragments = draw(st.lists(st.sampled_from([*FRAGMENTS, "word"]), max_size=30))
    return "".join(
        f"w{i}." if fragment == "word" else fragment for i, fragment in enumerate(fragments)
    )


@settings(max_examples=300)
@given(kind=st.sampled_from(list(PARSERS.values())), text=texts(), data=st.data())
def test_no_word_is_lost_and_cuts_do_not_matter(
    kind: type[ToolCallParser], text: str, data: st.DataObject
) -> None:
    content, calls = parse(kind(), text)
    shown = content + "".join(name + arguments for name, arguments in calls)
    words = re.findall(r"w\d+\.", text)
    assert sorted(re.findall(r"w\d+\.", shown)) == sorted(words)
    if not calls:
        assert content == text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(kind(), *pieces) == (content, calls)
    assert parse(kind(), *text) == (content, calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)


@settings(max_examples=150)
@given(
    wanted=st.lists(st.tuples(st.text(min_size=1, max_size=20), ARGUMENTS), min_size=1, max_size=3),
    ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
def test_every_well_formed_call_is_found(
    wanted: list[tuple[str, dict[str, object]]], *, ascii: bool, indent: int | None
) -> None:
    def write(field: str) -> list[str]:
        calls = [{"name": name, field: arguments} for name, arguments in wanted]
        return [json.dumps(call, ensure_ascii=ascii, indent=indent) for call in calls]

    hermes = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in write("arguments"))
    for parser, text in (
        (HermesParser(), hermes),
        (Llama3Parser(), "; ".join(write("parameters"))),
    ):
        content, calls = parse(parser, *text)
        assert content == ""
        assert [(name, json.loads(arguments)) for name, arguments in calls] == wanted


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ('{% if tools %}<|start_header_id|>{"name": …, "parameters": …}{% endif %}', "llama3_json"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", None),
        ("{% if tools %}<tool_call>\n<function=…>{% endif %}", None),
    ],
)
def test_a_chat_template_tells_its_form(template: str | None, name: str | None) -> None:
    assert detect_parser(template) == name
