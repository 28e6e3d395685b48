"""Tool calls found in text: well-formed ones are calls, everything else stays text."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mooncake_engine.text.argument_types import types_of
from mooncake_engine.text.tool_call_forms import (
    PARSERS,
    DeepseekParser,
    MistralParser,
    detect_parser,
)
from mooncake_engine.text.tool_call_parsers import (
    HermesParser,
    Llama3Parser,
    Qwen3CoderParser,
    ToolCallParser,
)

Calls = list[tuple[str, str]]


def parse(parser: ToolCallParser, *pieces: str) -> tuple[str, Calls]:
    """The whole content, and the name and arguments of every call."""
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
    # malformed after the start of the arguments: the call keeps the text before the error
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
CODER_TEA = """<tool_call>
<function=brew>
<parameter=kind>
green "A"

</parameter>
<parameter=cups>
2
</parameter>
</function>
</tool_call>"""
CODER = [
    ("no calls at all", "no calls at all", []),
    (CODER_TEA, "", [("brew", '{"kind": "green \\"A\\"\\n", "cups": "2"}')]),
    (
        f"First:\n{CODER_TEA}\n{CODER_TEA}\nDone.",
        "First:\n\nDone.",
        [("brew", '{"kind": "green \\"A\\"\\n", "cups": "2"}')] * 2,
    ),
    ("<tool_call><function=f></function></tool_call>", "", [("f", "{}")]),
    # tags that models forget
    ("<function=f>\n</function>\n</tool_call>\n", "", [("f", "{}")]),
    ("So: <function=f></function> <function=g></function>", "So: ", [("f", "{}"), ("g", "{}")]),
    ("<tool_call>\n<function=f>\n</tool_call> so", " so", [("f", "{}")]),
    # on one line, and with a value that looks like a tag
    ("<function=f><parameter=a>x</parameter></function>", "", [("f", '{"a": "x"}')]),
    (
        "<function=f><parameter=a>\n</function>\n</parameter></function>",
        "",
        [("f", '{"a": "</function>"}')],
    ),
    ("<function=f><parameter=a>\n</parameter></function>", "", [("f", '{"a": ""}')]),
    # malformed: text
    ("<tool_call>soon</tool_call>", "<tool_call>soon</tool_call>", []),
    ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ("<function=\nf>", "<function=\nf>", []),
    ("<function=> <function= >", "<function=> <function= >", []),
    ("a <function=f", "a <function=f", []),
    ("<tool_call>\n<func", "<tool_call>\n<func", []),
    (f"<function={'f' * 1025}></function>", f"<function={'f' * 1025}></function>", []),
    # malformed after the call has begun
    ("<function=f>\noh <function=g></function>", "\noh ", [("f", "{}"), ("g", "{}")]),
    ("<function=f>\n<parameter=a>\nx\n</para", "", [("f", '{"a": "x\\n</para')]),
    ("<function=f>\n", "", [("f", "{")]),
]
BEGIN, END, SEP = DeepseekParser.call, DeepseekParser.call_end, DeepseekParser.separator
ALL, DONE = DeepseekParser.opening, DeepseekParser.closing
V3_TEA = f'{BEGIN}function{SEP}brew\n```json\n{{"cups": 2}}\n```{END}'
V31_TEA = f'{BEGIN}brew{SEP}{{"cups": 2}}{END}'
BREWED = ("brew", '{"cups": 2}')
DEEPSEEK = [
    ("no calls at all", "no calls at all", []),
    (f"{ALL}{V3_TEA}{DONE}", "", [BREWED]),
    (f"Wait.\n{ALL}{V3_TEA}\n{V3_TEA}{DONE}", "Wait.\n", [BREWED, BREWED]),
    (f"{ALL}{V31_TEA}{DONE}", "", [BREWED]),
    (f"Wait. {ALL}{V31_TEA}{V31_TEA}{DONE} Done.", "Wait.  Done.", [BREWED, BREWED]),
    (f"{ALL}\n{BEGIN}a-b{SEP}\n{{}}\n{END}\n{DONE}\n", "", [("a-b", "{}")]),
    # tags that models forget
    (V31_TEA, "", [BREWED]),
    (f"{ALL}{V31_TEA}", "", [BREWED]),
    (f"{V3_TEA}{ALL}{V31_TEA}{DONE}", "", [BREWED, BREWED]),
    # malformed: text
    (f"{ALL}soon{DONE}", f"{ALL}soon{DONE}", []),
    (f"{ALL}{BEGIN}function{SEP}f\nsoon", f"{ALL}{BEGIN}function{SEP}f\nsoon", []),
    (f"{BEGIN}tool{SEP}f\n```json\n{{}}", f"{BEGIN}tool{SEP}f\n```json\n{{}}", []),
    (f"{BEGIN}{SEP}{{}}{END}", f"{BEGIN}{SEP}{{}}{END}", []),
    (f"{BEGIN}f{SEP}[1]{END}", f"{BEGIN}f{SEP}[1]{END}", []),
    (f"{BEGIN}f <b>{SEP}{{}}{END}", f"{BEGIN}f <b>{SEP}{{}}{END}", []),
    (f"{BEGIN}{'f' * 1100}{SEP}{{}}{END}", f"{BEGIN}{'f' * 1100}{SEP}{{}}{END}", []),
    (f"{ALL}{BEGIN}brew", f"{ALL}{BEGIN}brew", []),
    # malformed after the arguments have begun
    (f'{BEGIN}f{SEP}{{"a": 1', "", [("f", '{"a": 1')]),
    (f"{BEGIN}f{SEP}{{}} so", " so", [("f", "{}")]),
    (f"{BEGIN}function{SEP}f\n```json\n{{}}{END}", END, [("f", "{}")]),
]
LISTED = '{"name": "brew", "arguments": {"cups": 2}}'
MISTRAL = [
    ("no calls at all", "no calls at all", []),
    (f"[TOOL_CALLS][{LISTED}]", "", [BREWED]),
    (f"Hello[TOOL_CALLS] [{LISTED}, {LISTED}]\n", "Hello", [BREWED, BREWED]),
    (f'[TOOL_CALLS][{LISTED[:-1]}, "id": "abcdef123"}}]', "", [BREWED]),
    ('[TOOL_CALLS] [{"arguments":{"name": "J"}, "name": "age"}]', "", [("age", '{"name": "J"}')]),
    ('[TOOL_CALLS][{"id": "a", "arguments": {}, "name": "f"}]', "", [("f", "{}")]),
    (f"[TOOL_CALLS][{LISTED}]\nextra", "\nextra", [BREWED]),
    ('[TOOL_CALLS]brew{"cups": 2}', "", [BREWED]),
    ('[TOOL_CALLS]brew[ARGS]{"cups": 2}[TOOL_CALLS]f.g[ARGS]{}', "", [BREWED, ("f.g", "{}")]),
    ('So: [TOOL_CALLS]brew[CALL_ID]123456789[ARGS]{"cups": 2}', "So: ", [BREWED]),
    # malformed: text
    ("[TOOL_CALLS] not a call", "[TOOL_CALLS] not a call", []),
    ("[TOOL_CALLS] two words{}", "[TOOL_CALLS] two words{}", []),
    ("[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    ('[TOOL_CALLS][{"name": "f"}]', '[TOOL_CALLS][{"name": "f"}]', []),
    ("[TOOL_CALLS]brew", "[TOOL_CALLS]brew", []),
    (f"[TOOL_CALLS]{'f' * 1100}{{}}", f"[TOOL_CALLS]{'f' * 1100}{{}}", []),
    ("[TOOL_CALLS]f{} [TOOL", " [TOOL", [("f", "{}")]),
    # malformed after the arguments have begun
    ('[TOOL_CALLS]f{"a": 1', "", [("f", '{"a": 1')]),
    (f"[TOOL_CALLS][{LISTED}, no", ", no", [BREWED]),
    (f'[TOOL_CALLS][{LISTED[:-1]}, "more": 1}}]', ', "more": 1}]', [BREWED]),
]
CASES = [
    *((DeepseekParser, *case) for case in DEEPSEEK),
    *((MistralParser, *case) for case in MISTRAL),
    *((HermesParser, *case) for case in HERMES),
    *((Llama3Parser, *case) for case in LLAMA),
    *((Qwen3CoderParser, *case) for case in CODER),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_separates_calls_from_text(
    kind: type[ToolCallParser], text: str, content: str, calls: Calls
) -> None:
    assert parse(kind(), text) == (content, calls)
    assert parse(kind(), *text) == (content, calls)


def test_arguments_are_streamed() -> None:
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
    *(ALL, DONE, BEGIN, END, SEP, f"function{SEP}f\n```json\n", f"f{SEP}", "\n```", BEGIN[:7]),
    *("[TOOL_CALLS]", "[TOOL_CALLS][", "f[ARGS]{", "[CALL_ID]", "[TOOL", ', "id": "x"}'),
    *("<function=f>", "<function=", "</function>", "<parameter=a>", "</parameter>", ">", "<"),
]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Parts of calls in any order, with distinguishable words between them."""
    fragments = draw(st.lists(st.sampled_from([*FRAGMENTS, "word"]), max_size=30))
    return "".join(
        f"w{i}." if fragment == "word" else fragment for i, fragment in enumerate(fragments)
    )


@settings(max_examples=400)
@given(kind=st.sampled_from(list(PARSERS.values())), text=texts(), data=st.data())
def test_what_is_final_depends_on_the_text_alone(
    kind: type[ToolCallParser], text: str, data: st.DataObject
) -> None:
    """However it is split: another instance can go on at any character."""
    at = data.draw(st.integers(0, len(text)))
    whole = list(map(kind().push, text))
    continued = kind()
    continued.push(text[:at])
    assert list(map(continued.push, text[at:])) == whole[at:]


@settings(max_examples=400)
@given(kind=st.sampled_from(list(PARSERS.values())), text=texts(), data=st.data())
def test_no_text_is_lost_however_it_is_split(
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


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_200_random_splits_give_the_same_message(
    kind: type[ToolCallParser], text: str, content: str, calls: Calls
) -> None:
    numbers = random.Random(text)
    for _ in range(200):
        cuts = sorted(numbers.randrange(len(text) + 1) for _ in range(numbers.randrange(1, 12)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(kind(), *pieces) == (content, calls)


def test_deepseeks_tags_are_written_as_its_tokenizer_has_them() -> None:
    assert ALL.encode() == b"<\xef\xbd\x9ctool\xe2\x96\x81calls\xe2\x96\x81begin\xef\xbd\x9c>"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=4)


UNSET: list[tuple[dict[str, Any], Any]] = [
    ({"type": "integer", "anyOf": None, "enum": None, "$ref": None}, 1),
    ({"type": "integer", "anyOf": 3, "oneOf": "x", "allOf": {"a": 1}}, 1),
    ({"type": None}, "1"),
    ({"type": 5, "enum": 5}, "1"),
    ({"type": None, "enum": [1, 2]}, 1),
    ({"type": ["integer", {"x": 1}, None]}, 1),
]


@pytest.mark.parametrize(("schema", "value"), UNSET)
def test_keywords_without_a_value_are_ignored(schema: dict[str, Any], value: Any) -> None:
    """Clients in some languages write unset keywords as null."""
    parser = Qwen3CoderParser({"f": {"properties": {"a": schema}}})
    call = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    [(_, arguments)] = parse(parser, call)[1]
    assert json.loads(arguments) == {"a": value}


def test_each_part_of_a_schema_is_visited_once() -> None:
    """Without this, a schema that refers to itself from 100 places is visited a million times."""

    class Counted(dict[str, Any]):
        reads = 0

        def get(self, name: str, default: Any = None) -> Any:
            Counted.reads += name == "anyOf"
            return super().get(name, default)

    again = {"$ref": "#/$defs/a"}
    around = Counted(anyOf=[*(dict(again) for _ in range(100)), {"type": "integer"}])
    assert types_of({"properties": {"x": again}, "$defs": {"a": around}}, "x") == {"integer"}
    assert Counted.reads == 1


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
        (MistralParser(), f"[TOOL_CALLS][{', '.join(write('arguments'))}]"),
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
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        (f"{{% if tools %}}{ALL}{{% endif %}}", "deepseek_v31"),
        (f"{{% if tools %}}{ALL}```json{{% endif %}}", "deepseek_v3"),
        (ALL + "{{ messages }}", None),
        ("{% if tools %}<tool_call>\n<function=…>{% endif %}", "qwen3_coder"),
    ],
)
def test_the_format_is_detected_from_the_chat_template(
    template: str | None, name: str | None
) -> None:
    assert detect_parser(template) == name


TYPED: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {
            "string": {"type": "string"},
            "integer": {"type": "integer"},
            "number": {"type": "number"},
            "boolean": {"type": "boolean"},
            "array": {"type": "array"},
            "object": {"type": "object"},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "several": {"type": ["integer", "string"]},
            "choice": {"enum": ["a", 1]},
            "referred": {"$ref": "#/$defs/count"},
            "any": {},
        },
        "$defs": {"count": {"type": "integer"}},
    }
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("string", "3", "3"),
        ("string", "null", "null"),
        ("string", '{"a": 1}', '{"a": 1}'),
        ("integer", "3", 3),
        ("integer", "-3.0", -3),
        ("integer", "3.5", "3.5"),
        ("integer", "three", "three"),
        ("integer", "null", None),
        ("number", "3", 3),
        ("number", "2.50", 2.5),
        ("number", "1e999", "1e999"),
        ("number", "NaN", "NaN"),
        ("boolean", "true", True),
        ("boolean", "False", False),
        ("boolean", "maybe", "maybe"),
        ("array", '[1, "a"]', [1, "a"]),
        ("array", "['a', None]", ["a", None]),
        ("array", "[1,", "[1,"),
        ("object", '{\n  "a": {"b": []}\n}', {"a": {"b": []}}),
        ("object", "{'a': True}", {"a": True}),
        ("object", "{1, 2}", "{1, 2}"),
        ("object", "[" * 5000, "[" * 5000),
        ("either", "null", None),
        ("either", "tea", "tea"),
        ("several", "3", 3),
        ("several", "3 cups", "3 cups"),
        ("choice", "a", "a"),
        ("choice", "1", 1),
        ("referred", "7", 7),
        ("any", "7", "7"),
        ("unknown", "7", "7"),
    ],
)
def test_an_argument_has_the_type_of_its_schema(name: str, text: str, value: Any) -> None:
    call = f"<function=f>\n<parameter={name}>\n{text}\n</parameter>\n</function>"
    for pieces in ([call], list(call)):
        [(_, arguments)] = parse(Qwen3CoderParser(TYPED), *pieces)[1]
        assert json.loads(arguments) == {name: value}
        assert type(json.loads(arguments)[name]) is type(value)


@settings(max_examples=150)
@given(
    wanted=st.dictionaries(
        st.text("abc_", min_size=1, max_size=5),
        st.text().filter(lambda text: "</parameter>" not in text),
        max_size=4,
    ),
    data=st.data(),
)
def test_string_arguments_are_unchanged(wanted: dict[str, str], data: st.DataObject) -> None:
    lines = [f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in wanted.items()]
    call = f"<tool_call>\n<function=f>\n{''.join(lines)}</function>\n</tool_call>"
    cut = data.draw(st.integers(0, len(call)))
    content, [(name, arguments)] = parse(Qwen3CoderParser(), call[:cut], call[cut:])
    assert (content, name) == ("", "f")
    assert json.loads(arguments) == wanted


def test_string_arguments_are_streamed() -> None:
    parser = Qwen3CoderParser()
    parser.push("<tool_call>\n<function=f>\n<parameter=a>\n")
    assert [delta.arguments for delta in parser.push("one\n").calls] == ["one"]
    assert [delta.arguments for delta in parser.push("two</par").calls] == ["\\ntwo"]
    assert [delta.arguments for delta in parser.push("t").calls] == ["</part"]


HALF = r"\ud83d"  # half of a surrogate pair, which UTF-8 can't encode


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        (HermesParser(), f'<tool_call>{{"arguments": {{"x": "{HALF}"}}, "name": "f"}}</tool_call>'),
        (
            Qwen3CoderParser({"f": {"properties": {"x": {"type": "array"}}}}),
            "<tool_call>\n<function=f>\n<parameter=x>\n"
            f'["{HALF}"]\n</parameter>\n</function>\n</tool_call>',
        ),
    ],
)
def test_half_a_surrogate_pair_in_arguments_is_escaped(parser: ToolCallParser, call: str) -> None:
    content, [(name, arguments)] = parse(parser, call)
    assert (content, name) == ("", "f")
    assert HALF in arguments
    assert json.loads(arguments)["x"][0] == "\ud83d"


@pytest.mark.parametrize(
    "fields", ['"name": "%s", "arguments": {}', '"arguments": {}, "name": "%s"']
)
def test_a_name_with_half_a_surrogate_pair_is_no_call(fields: str) -> None:
    text = "<tool_call>{" + fields % HALF + "}</tool_call>"
    assert parse(HermesParser(), text) == (text, [])
