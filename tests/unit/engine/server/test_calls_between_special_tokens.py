"""DeepSeek's and Mistral's tool calls at the API: forced, parsed, and their ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.asgi import AsgiClient
from support.byte_tokenizer import write_byte_tokenizer
from support.fake_engine import EOS, FakeEngine, text_script
from tokenizers import Tokenizer as HfTokenizer

from mooncake_engine.server.app import create_app
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.text.grammars import vocabulary_of
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_engine.text.tool_call_forms import PARSERS, DeepseekParser

PATH = "/v1/chat/completions"
ASK = {"role": "user", "content": "tea?"}
BREW: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "brew",
        "parameters": {
            "type": "object",
            "properties": {"cups": {"type": "integer"}},
            "required": ["cups"],
        },
    },
}
TAGS = DeepseekParser
V3 = f'{TAGS.call}function{TAGS.separator}brew\n```json\n{{"cups": 2}}\n```{TAGS.call_end}'
V31 = f'{TAGS.call}brew{TAGS.separator}{{"cups": 2}}{TAGS.call_end}'
ITEM = '{"name": "brew", "arguments": {"cups": 2}}'
FORCED = {
    "deepseek_v3": f"{TAGS.opening}{V3}\n{V3}{TAGS.closing}",
    "deepseek_v31": f"{TAGS.opening}{V31}{V31}{TAGS.closing}",
    "mistral": f"[TOOL_CALLS][{ITEM}, {ITEM}]",
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(info=replace(FakeEngine().info, max_model_len=4096))


def client_of(engine: FakeEngine, directory: Path, form: str) -> AsgiClient:
    tokenizer = Tokenizer.load(write_byte_tokenizer(directory))
    return AsgiClient(create_app(engine, tokenizer, ServerOptions(form)), {"X-Request-Id": "r"})


@pytest.mark.parametrize("form", FORCED)
def test_a_forced_call_is_parsed(form: str, engine: FakeEngine, tmp_path: Path) -> None:
    engine.script = text_script(FORCED[form])
    client = client_of(engine, tmp_path, form)
    answer = client.post(PATH, messages=[ASK], tools=[BREW], tool_choice="required").json()
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [{"name": "brew", "arguments": '{"cups": 2}'}] * 2
    grammar = engine.seen[0].sampling.grammar
    assert grammar is not None
    for text, fits in ((FORCED[form], True), (FORCED[form].replace("2", '"two"'), False)):
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar.source))
        tokens = list(text.encode())
        assert (matcher.try_consume_tokens(tokens) == len(tokens)) is fits, matcher.get_error()
        assert not fits or matcher.is_accepting()


def test_mistrals_call_ids_are_short_and_deterministic(engine: FakeEngine, tmp_path: Path) -> None:
    engine.script = text_script(FORCED["mistral"])
    client = client_of(engine, tmp_path, "mistral")
    message = client.post(PATH, messages=[ASK], tools=[BREW]).json()["choices"][0]["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert all(len(each) == 9 and each.isalnum() for each in ids), (
        "Mistral's templates reject others"
    )
    assert len({*ids}) == 2
    chunks = client.stream(PATH, messages=[ASK], tools=[BREW])
    deltas = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["id"] for call in deltas if "id" in call] == ids


@pytest.mark.parametrize("offers_tools", [True, False])
def test_special_tokens_are_kept_where_tools_are_offered(
    engine: FakeEngine, tmp_path: Path, *, offers_tools: bool
) -> None:
    directory = write_byte_tokenizer(tmp_path)
    written = HfTokenizer.from_file(str(directory / "tokenizer.json"))
    written.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[OTHER]"])
    written.save(str(directory / "tokenizer.json"))
    calls, args, other = map(written.token_to_id, ("[TOOL_CALLS]", "[ARGS]", "[OTHER]"))
    said = [*b"So: ", other, calls, *b"brew", args, *b'{"cups": 2}', EOS]
    engine.script = lambda request: said
    app = create_app(engine, Tokenizer.load(directory), ServerOptions("mistral"))
    tools = {"tools": [BREW]} if offers_tools else {}
    choice = AsgiClient(app).post(PATH, messages=[ASK], **tools).json()["choices"][0]
    message = choice["message"]
    assert message["content"] == ("So: " if offers_tools else 'So: brew{"cups": 2}')
    if offers_tools:
        [call] = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"cups": 2}


CODER = "<function=brew>\n<parameter=cups>\n2\n</parameter>\n</function>"


@pytest.mark.parametrize(("form", "inside"), [("hermes", ITEM), ("qwen3_coder", CODER)])
def test_calls_are_found_where_the_tags_around_them_are_special_tokens(
    form: str, inside: str, engine: FakeEngine, tmp_path: Path
) -> None:
    directory = write_byte_tokenizer(tmp_path)
    written = HfTokenizer.from_file(str(directory / "tokenizer.json"))
    written.add_special_tokens(["<tool_call>", "</tool_call>"])
    written.save(str(directory / "tokenizer.json"))
    said = written.encode(f"So: <tool_call>\n{inside}\n</tool_call>").ids
    engine.script = lambda request: [*said, EOS]
    app = create_app(engine, Tokenizer.load(directory), ServerOptions(form))
    choice = AsgiClient(app).post(PATH, messages=[ASK], tools=[BREW]).json()["choices"][0]
    assert choice["message"]["content"] == "So: "
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"cups": 2}
    assert choice["finish_reason"] == "tool_calls"


SPECIAL = {
    "mistral": ["[TOOL_CALLS]"],
    "deepseek_v3": [TAGS.opening, TAGS.call, TAGS.separator, TAGS.call_end, TAGS.closing],
    "deepseek_v31": [TAGS.opening, TAGS.call, TAGS.separator, TAGS.call_end, TAGS.closing],
    "hermes": ["<tool_call>", "</tool_call>"],
}
HERMES = f"<tool_call>\n{ITEM}\n</tool_call>"


@pytest.mark.parametrize("form", SPECIAL)
def test_forced_calls_have_the_models_special_tokens(
    form: str, engine: FakeEngine, tmp_path: Path
) -> None:
    """No text matches them: models had to spell the tags, which they never do by themselves."""
    directory = write_byte_tokenizer(tmp_path)
    written = HfTokenizer.from_file(str(directory / "tokenizer.json"))
    written.add_special_tokens(SPECIAL[form])
    written.save(str(directory / "tokenizer.json"))
    tokenizer, size = Tokenizer.load(directory), written.get_vocab_size()
    engine.info = replace(engine.info, vocab_size=size)
    client = AsgiClient(create_app(engine, tokenizer, ServerOptions(form)))
    answer = client.post(PATH, messages=[ASK], tools=[BREW], tool_choice="required")
    assert answer.status_code == 200, answer.text
    text = FORCED.get(form, f"{HERMES}\n{HERMES}")
    tokens = written.encode(text, add_special_tokens=False).ids
    assert {written.token_to_id(tag) for tag in SPECIAL[form]} <= {*tokens}
    grammar = engine.seen[0].sampling.grammar
    assert grammar is not None
    matcher = vocabulary_of(tokenizer, size, (EOS,)).matcher(grammar)
    for token in (*tokens, EOS):
        matcher.accept(token)  # raises GrammarFailed if it does not fit


def test_every_format_can_be_forced(engine: FakeEngine, tmp_path: Path) -> None:
    for form in PARSERS:
        client = client_of(engine, tmp_path / form, form)
        asked = client.post(PATH, messages=[ASK], tools=[BREW], tool_choice="required")
        assert asked.status_code == 200, asked.text
