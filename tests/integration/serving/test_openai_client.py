"""The official ``openai`` client against a real server."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import openai
import pytest
from openai import OpenAI

PAGE = "Put both on one machine and they get in each other's way. A long"


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_completion(tiny_llama_url: str) -> None:
    with client_of(tiny_llama_url) as client:
        answer = client.completions.create(
            model="tiny-llama", prompt=PAGE, temperature=0, max_tokens=16
        )
    assert answer.choices[0].text == " prompt arrives,"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_streamed_completion(tiny_llama_url: str) -> None:
    with client_of(tiny_llama_url) as client:
        chunks = list(
            client.completions.create(
                model="tiny-llama",
                prompt=PAGE,
                temperature=0,
                stop=["arr"],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == " prompt "
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(" prompt arr")


def test_chat(tiny_llama_url: str) -> None:
    with client_of(tiny_llama_url) as client:
        answer = client.chat.completions.create(
            model="tiny-llama",
            messages=[{"role": "user", "content": "How do you say tea in Chinese?"}],
            temperature=0,
        )
    assert answer.choices[0].message.content == "Tea is 茶, and a cup of it is 🍵."
    assert answer.choices[0].finish_reason == "stop"


def test_streamed_chat(tiny_llama_url: str) -> None:
    with client_of(tiny_llama_url) as client:
        stream = client.chat.completions.create(
            model="tiny-llama",
            messages=[{"role": "user", "content": "How do you say tea in Chinese?"}],
            temperature=0,
            stream=True,
            logprobs=True,
            top_logprobs=2,
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "Tea is 茶, and a cup of it is 🍵."
    assert chunks[0].choices[0].delta.role == "assistant"
    logprobs = [c.choices[0].logprobs for c in chunks[1:]]
    tokens = [entry for each in logprobs if each for entry in each.content or []]
    assert b"".join(bytes(token.bytes or []) for token in tokens).decode().startswith(text)
    assert all(len(token.top_logprobs) == 2 for token in tokens)


def test_models(tiny_llama_url: str) -> None:
    with client_of(tiny_llama_url) as client:
        assert [model.id for model in client.models.list()] == ["tiny-llama"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError),
    ],
)
def test_errors_raise_matching_classes(
    tiny_llama_url: str, options: dict[str, Any], error: type[openai.APIStatusError]
) -> None:
    wanted = {"model": "tiny-llama", "prompt": "x"} | options
    with client_of(tiny_llama_url) as client, pytest.raises(error) as info:
        client.completions.create(**wanted)
    assert info.value.body is not None


def test_client_disconnect_aborts_stream(served: Any) -> None:
    """The client disconnects over real sockets, in the middle of an answer."""
    served.engine.hold_at = 2
    with client_of(served.url) as client:
        stream = client.completions.create(model="fake", prompt="tea", stream=True)
        assert next(iter(stream)).choices[0].text == "T"
        stream.close()
    _eventually(lambda: served.engine.left_early == [served.engine.seen[0].request_id])


def test_stream_error_reaches_client(served: Any) -> None:
    served.engine.die_at = 1
    with client_of(served.url) as client:
        stream = client.completions.create(model="fake", prompt="tea", stream=True)
        with pytest.raises(openai.APIError, match="out of luck"):
            list(stream)


def test_many_streams_at_once(served: Any) -> None:
    """Many concurrent connections, each with its own text."""
    texts: dict[int, str] = {}

    def ask(client: OpenAI, number: int) -> None:
        stream = client.completions.create(model="fake", prompt=f"tea {number}", stream=True)
        texts[number] = "".join(chunk.choices[0].text for chunk in stream)

    with client_of(served.url) as client:
        threads = [threading.Thread(target=ask, args=(client, i)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {i: f"TEA {i}" for i in range(32)}


def _eventually(holds: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"cups": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["cups"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("brew", "pour")
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pour"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_call(tiny_llama_url: str, choice: Any, *, stream: bool) -> None:
    """Works even with a model that was not trained on tools."""
    with client_of(tiny_llama_url) as client:
        answer = client.chat.completions.create(
            model="tiny-llama",
            messages=[{"role": "user", "content": "Tea!"}],
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            stream=stream,
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
            name, ending = pieces[0].function.name, chunks[-1].finish_reason
            arguments = "".join(piece.function.arguments or "" for piece in pieces)
            assert len(pieces) > 2
            assert pieces[0].id
        else:
            ending = answer.choices[0].finish_reason
            [call] = answer.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
    assert ending == "tool_calls"
    assert name == "pour" if isinstance(choice, dict) else name in ("brew", "pour")
    assert 1 <= json.loads(arguments)["cups"] <= 9
