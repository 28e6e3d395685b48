"""Reasoning at the API: in its own fields, complete and streamed, and omitted if requested."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.asgi import AsgiClient
from support.byte_tokenizer import write_byte_tokenizer
from support.fake_engine import FakeEngine, text_script

from mooncake_engine.sampling_params import GrammarKind
from mooncake_engine.server.app import create_app
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.text.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% endfor %}<|assistant|>{{ '<think>' if is_open }}"
)
ASK = {"role": "user", "content": "2 + 2?"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("reasoning")
    return Tokenizer.load(write_byte_tokenizer(directory, chat_template=TEMPLATE))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(text_script("<think>Hm, 4.</think>It is 4."))


@pytest.fixture
def client(engine: FakeEngine, tokenizer: Tokenizer) -> AsgiClient:
    return AsgiClient(create_app(engine, tokenizer))


def message_of(client: AsgiClient, **more: Any) -> dict[str, Any]:
    answer = client.post(PATH, messages=[ASK], **more)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def test_reasoning_has_its_own_fields(client: AsgiClient) -> None:
    message = message_of(client)
    assert message["content"] == "It is 4."
    assert message["reasoning"] == message["reasoning_content"] == "Hm, 4."


def test_reasoning_is_streamed_before_the_answer(client: AsgiClient) -> None:
    answer = client.post(PATH, messages=[ASK], stream=True)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    reasoning = [delta["reasoning"] for delta in deltas if "reasoning" in delta]
    content = [delta["content"] for delta in deltas if delta.get("content")]
    assert "".join(reasoning) == "Hm, 4."
    assert len(reasoning) > 3
    assert "".join(content) == "It is 4."
    assert all("content" not in delta for delta in deltas if "reasoning" in delta)


def test_reasoning_can_be_omitted(client: AsgiClient) -> None:
    message = message_of(client, include_reasoning=False)
    assert message["content"] == "It is 4."
    assert "reasoning" not in message
    assert "reasoning_content" not in message
    answer = client.post(PATH, messages=[ASK], stream=True, include_reasoning=False)
    assert "Hm" not in answer.text


def test_an_output_that_ends_inside_the_reasoning_has_no_content(tokenizer: Tokenizer) -> None:
    client = AsgiClient(create_app(FakeEngine(text_script("<think>Hm")), tokenizer))
    message = message_of(client)
    assert (message["reasoning"], message["content"]) == ("Hm", None)


def test_an_open_prompt_starts_inside_the_reasoning(tokenizer: Tokenizer) -> None:
    client = AsgiClient(create_app(FakeEngine(text_script("Hm</think>4")), tokenizer))
    message = message_of(client, chat_template_kwargs={"is_open": True})
    assert (message["reasoning"], message["content"]) == ("Hm", "4")


def test_earlier_reasoning_goes_to_the_template(client: AsgiClient, engine: FakeEngine) -> None:
    for name in ("reasoning", "reasoning_content"):
        earlier = {"role": "assistant", "content": "4", name: "Hm"}
        assert client.post(PATH, messages=[ASK, earlier, ASK]).status_code == 200
        prompt = bytes(engine.seen[-1].prompt_token_ids).decode()
        assert "<think>Hm</think>4" in prompt


def test_a_grammar_constrains_the_answer_after_the_reasoning(
    client: AsgiClient, engine: FakeEngine
) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    message_of(client, response_format=format_)
    grammar = engine.seen[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert '("<think>" thought)? /\\s{0,20}/ answer' in grammar.source


@pytest.mark.parametrize(("choice", "is_split"), [("none", False), ("qwen3", True)])
def test_the_option_overrides_the_template(choice: str, is_split: bool, tmp_path: Path) -> None:
    plain = Tokenizer.load(write_byte_tokenizer(tmp_path))
    engine = FakeEngine(text_script("<think>Hm</think>4"))
    options = ServerOptions(reasoning_parser=choice)
    message = message_of(AsgiClient(create_app(engine, plain, options)))
    assert message["content"] == ("4" if is_split else "<think>Hm</think>4")
