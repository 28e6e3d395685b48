"""``/v1/responses`` with the official ``openai`` client: one instance, and a pair behind a
proxy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import TypeAdapter

MODEL = "tiny-llama"
QUESTION = "How do you say tea in Chinese?"
ANSWER = "Tea is 茶, and a cup of it is 🍵."
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [
    {
        "type": "function",
        "name": name,
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"cups": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["cups"],
            "additionalProperties": False,
        },
    }
    for name in ("brew", "pour")
]


@pytest.fixture
def client(either_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{either_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def validated(response: Response) -> Response:
    """Validate with the client's types, since the client itself accepts any response."""
    return Response.model_validate(_plain(response), strict=True)


def _plain(found: Any) -> Any:
    # warnings of the client about its own types
    return found.model_dump(by_alias=True, warnings=False)


def test_response(client: OpenAI) -> None:
    response = validated(client.responses.create(model=MODEL, input=QUESTION, temperature=0))
    assert response.output_text == ANSWER
    assert response.status == "completed"
    assert response.temperature == 0
    assert response.usage is not None
    assert response.usage.output_tokens > len(ANSWER)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_streamed_response(client: OpenAI) -> None:
    wanted: Any = {"model": MODEL, "input": QUESTION, "temperature": 0}
    events = list(client.responses.create(stream=True, **wanted))
    for event in events:
        EVENT.validate_python(_plain(event), strict=True)
    with client.responses.stream(**wanted) as stream:
        final = stream.until_done().get_final_response()
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER
    assert len(deltas) > 5
    assert final.output_text == ANSWER
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"


def test_truncated_response(client: OpenAI) -> None:
    wanted: Any = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 5}
    response = validated(client.responses.create(**wanted))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 5
    events = list(client.responses.create(**wanted, stream=True))
    assert events[-1].type == "response.incomplete"
    assert validated(events[-1].response).output_text == response.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "pour"}])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_and_its_result(client: OpenAI, choice: Any, *, stream: bool) -> None:
    options: Any = {"model": MODEL, "tools": TOOLS, "parallel_tool_calls": False}
    ask: Any = {"role": "user", "content": "Tea!"}
    if stream:
        with client.responses.stream(input=[ask], tool_choice=choice, **options) as events:
            response = events.get_final_response()
    else:
        response = client.responses.create(input=[ask], tool_choice=choice, **options)
    [call] = validated(response).output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "pour" if isinstance(choice, dict) else call.name in ("brew", "pour")
    assert 1 <= json.loads(call.arguments)["cups"] <= 9
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    response = client.responses.create(
        input=[ask, call.model_dump(exclude_none=True), result],
        tool_choice="none",
        max_output_tokens=4,
        **options,
    )
    assert validated(response).usage is not None


def test_log_probabilities(client: OpenAI) -> None:
    response = client.responses.create(
        model=MODEL,
        input=QUESTION,
        temperature=0,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        max_output_tokens=5,
    )
    message: Any = validated(response).output[0]
    tokens = message.content[0].logprobs
    assert len(tokens) == 5
    assert all(len(token.top_logprobs) == 2 for token in tokens)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
        ({"store": True}, openai.BadRequestError, "store"),
        ({"tools": [{"type": "code_interpreter"}]}, openai.BadRequestError, "code_interpreter"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
        ({"model": "other"}, openai.NotFoundError, "other"),
    ],
)
def test_errors(client: OpenAI, options: Any, error: Any, words: str) -> None:
    for stream in (False, True):
        wanted = {"model": MODEL, "input": "x", "stream": stream} | options
        with pytest.raises(error, match=words):
            client.responses.create(**wanted)


def test_client_disconnect_aborts_stream(served: Any) -> None:
    served.engine.hold_at = 2
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.responses.create(model="fake", input="tea", stream=True)
        kinds = (event.type for event in stream)
        assert any(kind == "response.output_text.delta" for kind in kinds)
        stream.close()
    deadline = time.monotonic() + 5
    while served.engine.left_early != [served.engine.seen[0].request_id]:
        assert time.monotonic() < deadline, "the request was not aborted"
        time.sleep(0.01)


def test_stream_error_is_last_event(served: Any) -> None:
    served.engine.die_at = 1
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        events = list(client.responses.create(model="fake", input="tea", stream=True))
    assert events[-1].type == "response.failed"
    error = events[-1].response.error
    assert error is not None
    assert "out of luck" in error.message
