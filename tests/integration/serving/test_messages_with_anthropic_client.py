"""``/v1/messages`` with the official ``anthropic`` client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from support.asgi_server import serving_app
from support.byte_tokenizer import write_byte_tokenizer
from support.fake_engine import FakeEngine, text_script

from mooncake_engine.server.app import create_app
from mooncake_engine.text.tokenizer import Tokenizer

MODEL = "tiny-llama"
QUESTION: Any = {"role": "user", "content": "How do you say tea in Chinese?"}
ANSWER = "Tea is 茶, and a cup of it is 🍵."
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
# Qwen's template, shortened
TEMPLATE = (
    "{% if tools %}# Tools: <tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }}){% endif %}"
    "{% endfor %}<|assistant|>"
)
OUTPUT = (
    "<think>Hm.</think>At once.\n"
    '<tool_call>\n{"name": "brew", "arguments": {"cups": 2}}\n</tool_call>'
)
BREW: Any = {"name": "brew", "input_schema": {"type": "object", "properties": {}}}


def client_of(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0)


@pytest.fixture
def scripted() -> FakeEngine:
    return FakeEngine(text_script(OUTPUT), info=replace(FakeEngine().info, max_model_len=4096))


@pytest.fixture
def client(scripted: FakeEngine, tmp_path: Path) -> Iterator[Anthropic]:
    """A client of a server whose engine returns reasoning, text and a tool call."""
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, chat_template=TEMPLATE))
    with serving_app(create_app(scripted, tokenizer)) as url, client_of(url) as client:
        yield client


def validated(message: Message) -> Message:
    """Validate with the client's types, since the client itself accepts any response."""
    found = message.model_dump(by_alias=True, warnings=False)
    return Message.model_validate(found, strict=True)


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_tool_call_are_separate_blocks(
    client: Anthropic, *, stream: bool
) -> None:
    wanted: Any = {"model": "fake", "max_tokens": 500, "messages": [QUESTION], "tools": [BREW]}
    if stream:
        with client.messages.stream(**wanted) as events:
            message = events.get_final_message()
    else:
        message = validated(client.messages.create(**wanted))
    thinking, text, call = message.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, thinking.signature) == ("Hm.", message.id)
    assert text.type == "text"
    assert text.text.strip() == "At once."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("brew", {"cups": 2})
    assert message.stop_reason == "tool_use"
    counted = client.messages.count_tokens(model="fake", messages=[QUESTION], tools=[BREW])
    assert counted.input_tokens == message.usage.input_tokens
    assert message.usage.output_tokens == len(OUTPUT) + 1


def test_every_event_has_its_type(client: Anthropic) -> None:
    wanted: Any = {"model": "fake", "max_tokens": 500, "messages": [QUESTION], "tools": [BREW]}
    events = list(client.messages.create(stream=True, **wanted))
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True, warnings=False), strict=True)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens > 0


def test_message_history_reaches_chat_template(client: Anthropic, scripted: FakeEngine) -> None:
    options: Any = {"model": "fake", "max_tokens": 500, "tools": [BREW]}
    message = client.messages.create(messages=[QUESTION], **options)
    blocks: Any = [block.model_dump(exclude_none=True) for block in message.content]
    result: Any = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "done"}
    turns: Any = [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    client.messages.create(messages=[QUESTION, *turns], **options)
    seen = bytes(scripted.seen[-1].prompt_token_ids).decode()
    [call] = blocks[2:]
    assert "<think>Hm.</think>At once." in seen
    assert 'brew{"cups": 2}</tool_call>' in seen
    assert seen.endswith(f"<|tool|>done({call['id']})<|assistant|>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 5}, ("max_tokens", None)),
        ({"max_tokens": 200, "stop_sequences": ["once"]}, ("stop_sequence", "once")),
        ({"max_tokens": 500}, ("end_turn", None)),
    ],
)
def test_stop_reasons(client: Anthropic, options: Any, reason: Any, *, stream: bool) -> None:
    wanted = {"model": "fake", "messages": [QUESTION]} | options
    if stream:
        with client.messages.stream(**wanted) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**wanted)
    assert (message.stop_reason, message.stop_sequence) == reason


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"container": "c"}, anthropic.BadRequestError, "container"),
        ({"temperature": -1}, anthropic.BadRequestError, "temperature"),
        ({"model": "other"}, anthropic.NotFoundError, "other"),
    ],
)
def test_errors(client: Anthropic, options: Any, error: Any, words: str) -> None:
    for stream in (False, True):
        with pytest.raises(error, match=words) as info:
            client.messages.create(
                model="fake", max_tokens=5, messages=[QUESTION], stream=stream, extra_body=options
            )
        assert info.value.body["type"] == "error"
    with pytest.raises(anthropic.NotFoundError, match="other"):
        client.messages.count_tokens(model="other", messages=[QUESTION])


def test_message_from_pair(tiny_llama_pair_url: str) -> None:
    """A prefill and a decode instance behind a proxy."""
    wanted: Any = {"model": MODEL, "max_tokens": 200, "messages": [QUESTION]}
    wanted["extra_body"] = {"temperature": 0}  # a field that the client's types no longer have
    with client_of(tiny_llama_pair_url) as client:
        message = validated(client.messages.create(**wanted))
        assert text_of(message) == ANSWER
        assert message.stop_reason == "end_turn"
        counted = client.messages.count_tokens(model=MODEL, messages=[QUESTION]).input_tokens
        usage = message.usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        with client.messages.stream(**wanted) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
    assert "".join(pieces) == ANSWER == text_of(final)
    assert len(pieces) > 5
    assert final.usage.output_tokens == usage.output_tokens


def test_client_disconnect_aborts_stream(served: Any) -> None:
    served.engine.hold_at = 2
    with client_of(served.url) as client:
        wanted: Any = {"model": "fake", "max_tokens": 9, "messages": [QUESTION]}
        stream = client.messages.create(stream=True, **wanted)
        assert any(event.type == "content_block_delta" for event in stream)
        stream.close()
    deadline = time.monotonic() + 5
    while served.engine.left_early != [served.engine.seen[0].request_id]:
        assert time.monotonic() < deadline, "the request was not aborted"
        time.sleep(0.01)


def test_stream_error_reaches_client(served: Any) -> None:
    served.engine.die_at = 1
    with client_of(served.url) as client:
        wanted: Any = {"model": "fake", "max_tokens": 9, "messages": [QUESTION]}
        with pytest.raises(anthropic.APIStatusError, match="out of luck"):
            list(client.messages.create(stream=True, **wanted))
