"""Structured outputs at the API: what reaches the engine, and what is rejected."""

from __future__ import annotations

import builtins
import json
from typing import Any

import pytest
from support.asgi import AsgiClient
from support.fake_engine import FakeEngine

from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.text import grammars
from mooncake_engine.text.grammars import Vocabulary
from mooncake_engine.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"cups": {"type": "integer"}}, "required": ["cups"]}
TAGS = {"structures": [{"begin": "<fn=a>", "schema": {}, "end": "</fn>"}], "triggers": ["<fn="]}
TAG_GRAMMAR = r"""start: (tag_0)* rest
rest: TEXT
TEXT: /(.|\n)*/
tag_0_trigger[lazy]: TEXT "<fn="
tag_0: tag_0_trigger "a>" %json {"x-guidance": {"whitespace_pattern": "[ \\t\\n]{0,20}"}} "</fn>"
"""
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "tea?"}]})
COMPLETION = ("/v1/completions", {"prompt": "tea?"})


@pytest.mark.parametrize(("path", "body"), [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        ),
        (
            {"structured_outputs": {"json_object": False, "regex": "[a-c]+"}},
            Grammar(GrammarKind.REGEX, "[a-c]+"),
        ),
        ({"structured_outputs": {"regex": "[a-c]+"}}, Grammar(GrammarKind.REGEX, "[a-c]+")),
        (
            {"structured_outputs": {"choice": ["té", 'a "cup"']}},
            Grammar(GrammarKind.LARK, 'start: "té" | "a \\"cup\\""'),
        ),
        (
            {"structured_outputs": {"grammar": 'start: "tea"+'}},
            Grammar(GrammarKind.LARK, 'start: "tea"+'),
        ),
        (
            {"response_format": {"type": "structural_tag", **TAGS}},
            Grammar(GrammarKind.LARK, TAG_GRAMMAR),
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            Grammar(GrammarKind.LARK, TAG_GRAMMAR),
        ),
    ],
)
def test_a_field_becomes_a_grammar(
    client: AsgiClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    wanted: dict[str, Any],
    grammar: Grammar | None,
) -> None:
    response = client.post(path, **body, **wanted)
    assert response.status_code == 200, response.text
    assert engine.seen[0].sampling.grammar == grammar


def as_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (as_schema({"type": "nonsense"}), "Invalid type: nonsense"),
        (as_schema({"type": "object", "not": {"a": 1}}), 'Unimplemented keys: ["not"]'),
        (as_schema({"$ref": "http://elsewhere/schema"}), "not present in a registry"),
        (as_schema({"$ref": "#/$defs/none"}), "JSON schema is rejected"),
        (as_schema({"const": "x" * 600_000}), "characters, more than"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is required"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        (
            {"response_format": {"type": "structural_tag", **TAGS, "triggers": ["<f>"]}},
            "'<fn=a>' begins with none of the triggers",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAGS, "triggers": [""]}},
            "no trigger may be empty",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structural_tag must be the JSON"),
        ({"structured_outputs": {"regex": "("}}, "regular expression is rejected"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "Lark grammar is rejected"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not valid JSON"),
        ({"structured_outputs": {"choice": []}}, "at least one text"),
        ({"structured_outputs": {"choice": ["a"] * 2000}}, "at most 1999, got 2000"),
        ({"structured_outputs": {}}, "must hold one of json, json_object, regex, choice"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "must hold one of"),
        (as_schema({}) | {"structured_outputs": {"regex": "a"}}, "exclude each other"),
        (as_schema({}) | {"min_tokens": 3}, "min_tokens or ignore_eos"),
        (as_schema({}) | {"ignore_eos": True}, "min_tokens or ignore_eos"),
    ],
)
def test_invalid_structured_outputs_are_rejected(
    client: AsgiClient, engine: FakeEngine, wanted: dict[str, Any], words: str
) -> None:
    response = client.post(CHAT[0], **CHAT[1], **wanted)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert not engine.seen


def test_a_missing_library_is_named_with_its_command(
    client: AsgiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without_llguidance(name: str, *rest: Any, **more: Any) -> Any:
        if name == "llguidance":
            raise ModuleNotFoundError("No module named 'llguidance'", name=name)
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_llguidance)
    monkeypatch.setattr(grammars, "_vocabularies", {})
    response = client.post(CHAT[0], **CHAT[1], **as_schema(SCHEMA))
    assert response.status_code == 400
    assert "pip install 'llguidance>=1.9,<2'" in response.json()["error"]["message"]


@pytest.mark.timeout(300)
def test_a_schema_that_never_finishes_compiling_is_rejected(
    client: AsgiClient, engine: FakeEngine
) -> None:
    endless = {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]}
    for _ in range(2):
        response = client.post(CHAT[0], **CHAT[1], **as_schema(endless))
        assert response.status_code == 400
        assert "compiling it takes more than 1 s" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "response_format"
    assert not engine.seen


@pytest.mark.parametrize("depth", [200, 900, 5000])
def test_a_deep_schema_is_rejected_or_accepted(client: AsgiClient, depth: int) -> None:
    schema = '{"type":"array","items":' * depth + "true" + "}" * depth
    wanted = f'{{"prompt": "tea", "structured_outputs": {{"json": {schema}}}}}'
    response = client.request("POST", "/v1/completions", content=wanted)
    assert response.status_code in (200, 400), response.text


def allowed_ids(allowed: bytes, size: int = 258) -> set[int]:
    return {i for i in range(size) if allowed[i // 8] >> i % 8 & 1}


def test_a_matcher_returns_the_allowed_tokens(byte_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_tokenizer, 258, (256, 7))
    matcher = vocabulary.matcher(Grammar(GrammarKind.REGEX, "a[bc]d?"))
    assert allowed_ids(matcher.allowed()) == {ord("a")}
    matcher.accept(ord("a"))
    assert allowed_ids(matcher.allowed()) == {ord("b"), ord("c")}
    matcher.accept(ord("c"))
    assert allowed_ids(matcher.allowed()) == {ord("d"), 256, 7}  # every end-of-sequence token
    matcher.accept(ord("d"))
    assert allowed_ids(matcher.allowed()) == {256, 7}


def test_requests_have_independent_matchers(byte_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_tokenizer, 258, (256,))
    grammar = Grammar(GrammarKind.REGEX, "ab")
    first, second = vocabulary.matcher(grammar), vocabulary.matcher(grammar)
    first.accept(ord("a"))
    assert allowed_ids(first.allowed()) == {ord("b")}
    assert allowed_ids(second.allowed()) == {ord("a")}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
    ],
)
def test_a_rejected_grammar_names_its_field(
    client: AsgiClient, asked: dict[str, Any], field: str
) -> None:
    response = client.post("/v1/completions", prompt="tea?", **asked)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
