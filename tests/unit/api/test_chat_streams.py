"""Chat streams as streams of other formats: events in order, however the bytes are split."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mooncake_api.api_formats import API_FORMATS, Translation

Json = dict[str, Any]
BODIES: dict[str, Json] = {
    "/v1/responses": {"model": "m", "input": "tea?", "stream": True},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 9,
        "stream": True,
        "messages": [{"role": "user", "content": "tea?"}],
    },
}
HEAD: Json = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 5, "model": "m"}
USAGE: Json = {
    "prompt_tokens": 10,
    "completion_tokens": 4,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 3},
}
BREW: Json = {"index": 0, "id": "c1", "type": "function"}
DELTAS: list[Json] = [
    {"role": "assistant", "content": ""},
    {"reasoning": "Hm", "reasoning_content": "Hm"},
    {"reasoning": ", te", "reasoning_content": ", te"},
    {"content": "At"},
    {"content": " once. 🍵"},
    {"tool_calls": [BREW | {"function": {"name": "brew", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"cups":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": "2}"}}]},
    {"tool_calls": [BREW | {"index": 1, "id": "c2", "function": {"name": "pour"}}]},
]


def translation_of(path: str, **more: Any) -> Translation:
    return API_FORMATS[path].translate(json.dumps(BODIES[path] | more).encode())


def chunk(delta: Json, finish: str | None = None, stop: Any = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop}
    return b"data: " + json.dumps(HEAD | {"choices": [choice]}).encode() + b"\n\n"


def ending(finish: str, stop: Any = None) -> bytes:
    usage = json.dumps(HEAD | {"choices": [], "usage": USAGE}).encode()
    return chunk({"content": ""}, finish, stop) + b"data: " + usage + b"\n\ndata: [DONE]\n\n"


def read(data: bytes) -> list[tuple[str, Json]]:
    """Each event's name and payload."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(payload.removeprefix("data: "))))
    return found


STREAM = b"".join(map(chunk, DELTAS)) + ending("tool_calls")


@pytest.mark.parametrize("path", BODIES)
def test_the_events_do_not_depend_on_the_split(path: str) -> None:
    whole = translation_of(path).events(STREAM)
    drawn = random.Random(3)
    for _ in range(200):
        cut, at, translation = b"", 0, translation_of(path)
        while at < len(STREAM):
            size = drawn.choice((1, 7, 100, 1000))
            cut += translation.events(STREAM[at : at + size])
            at += size
        assert cut == whole
    assert translation_of(path).events(STREAM.replace(b"\n", b"\r\n")) == whole


def test_events_of_a_response() -> None:
    events = read(translation_of("/v1/responses").events(STREAM))
    assert all(name == payload["type"] for name, payload in events)
    assert [payload["sequence_number"] for _, payload in events] == list(range(len(events)))
    shortened = [name.removeprefix("response.") for name, _ in events]
    assert shortened == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *["reasoning_text.delta"] * 2,
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *["output_text.delta"] * 2,
        *("output_text.done", "content_part.done", "output_item.done"),
        "output_item.added",
        *["function_call_arguments.delta"] * 2,
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    response = events[-1][1]["response"]
    assert [item["type"] for item in response["output"]] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert response["output"][0]["content"][0]["text"] == "Hm, te"
    assert response["output"][1]["content"][0]["text"] == "At once. 🍵"
    assert response["output"][2]["arguments"] == '{"cups":2}'
    assert response["output"][3]["call_id"] == "c2"
    assert response["id"] == events[0][1]["response"]["id"] == "resp_7"
    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 14,
    }


def test_events_of_a_message() -> None:
    events = read(translation_of("/v1/messages").events(STREAM))
    assert all(name == payload["type"] for name, payload in events)
    block = ("content_block_start", "content_block_stop")
    assert [name for name, _ in events] == [
        "message_start",
        *(block[0], *["content_block_delta"] * 3, block[1]),  # thinking and its signature
        *(block[0], *["content_block_delta"] * 2, block[1]),
        *(block[0], *["content_block_delta"] * 2, block[1]),
        *block,
        *("message_delta", "message_stop"),
    ]
    deltas = [payload["delta"] for name, payload in events if name == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Hm, te"
    assert "".join(delta.get("text", "") for delta in deltas) == "At once. 🍵"
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"cups":2}'
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2][1]["usage"] == {
        "input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 4,
    }


@pytest.mark.parametrize(
    ("finish", "stop", "of_response", "of_message"),
    [
        ("stop", None, "completed", "end_turn"),
        ("stop", 2, "completed", "end_turn"),
        ("stop", "er", "completed", "stop_sequence"),
        ("length", None, "incomplete", "max_tokens"),
        ("tool_calls", None, "completed", "tool_use"),
    ],
)
def test_finish_reasons(finish: str, stop: Any, of_response: str, of_message: str) -> None:
    stream = chunk({"content": "tea"}) + ending(finish, stop)
    name, payload = read(translation_of("/v1/responses").events(stream))[-1]
    assert name == f"response.{of_response}"
    assert payload["response"]["status"] == of_response
    if of_response == "incomplete":
        assert payload["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert payload["response"]["output"][-1]["status"] == "incomplete"
    delta = read(translation_of("/v1/messages").events(stream))[-2][1]["delta"]
    sequence = stop if isinstance(stop, str) else None
    assert delta == {"stop_reason": of_message, "stop_sequence": sequence}


@pytest.mark.parametrize("before", [b"", chunk({"content": "tea"})])
def test_an_error_ends_a_stream(before: bytes) -> None:
    error = b'data: {"error":{"message":"out of luck","type":"server_error","code":503}}\n\n'
    stream = before + error + chunk({"content": "more"}) + b"data: [DONE]\n\n"
    events = read(translation_of("/v1/responses").events(stream))
    assert events[0][0] == "response.created"
    assert events[-1][0] == "response.failed"
    failure = {"code": "server_error", "message": "out of luck"}
    assert events[-1][1]["response"]["error"] == failure
    events = read(translation_of("/v1/messages").events(stream))
    assert events[0][0] == "message_start"
    message = {"type": "overloaded_error", "message": "out of luck"}
    assert events[-1] == ("error", {"type": "error", "error": message})


@pytest.mark.parametrize(
    ("deltas", "item"),
    [
        ([{"content": "At"}, {"content": " on"}], {"type": "message", "text": "At on"}),
        (DELTAS[5:7], {"type": "function_call", "arguments": '{"cups":'}),
    ],
)
def test_a_failed_response_has_the_output_so_far(deltas: list[Json], item: Json) -> None:
    data = b"".join(map(chunk, deltas)) + b'data: {"error": {"message": "gone", "code": 503}}\n\n'
    [*_, (kind, payload)] = read(translation_of("/v1/responses").events(data))
    assert kind == "response.failed"
    [found] = payload["response"]["output"]
    text = found["content"][0] if "content" in found else found
    assert {**found, **text, "type": found["type"]}.items() >= item.items()


@pytest.mark.parametrize("path", BODIES)
def test_a_complete_answer_equals_the_stream(path: str) -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "brew", "arguments": '{"cups":2}'}},
        {"id": "c2", "type": "function", "function": {"name": "pour", "arguments": ""}},
    ]
    message = {"content": "At once. 🍵", "reasoning": "Hm, te", "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    answer = HEAD | {"choices": [choice], "usage": USAGE}
    status, body = translation_of(path).complete(200, json.dumps(answer).encode())
    assert status == 200
    whole = json.loads(body)
    events = read(translation_of(path).events(STREAM))
    if path == "/v1/responses":
        assert whole == events[-1][1]["response"]
        return
    assert whole == events[0][1]["message"] | whole
    assert [block["type"] for block in whole["content"]] == [
        *("thinking", "text", "tool_use", "tool_use")
    ]
    assert whole["content"][2]["input"] == {"cups": 2}
    assert whole["content"][3]["input"] == {}
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"] == events[-2][1]["usage"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices":[]}', b'{"choices":[{"index":0}]}'])
def test_a_body_that_is_no_answer_is_an_error(path: str, body: bytes) -> None:
    status, found = translation_of(path).complete(200, body)
    assert status == 502
    assert "did not return a chat completion" in json.loads(found)["error"]["message"]


def test_errors_are_translated() -> None:
    refused = b'{"error":{"message":"no","type":"invalid_request_error","param":"x","code":null}}'
    assert translation_of("/v1/responses").complete(400, refused) == (400, refused)
    status, body = translation_of("/v1/messages").complete(429, refused)
    assert status == 429
    assert json.loads(body) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "no"},
    }
    _, body = translation_of("/v1/messages").complete(502, b"<html>bad gateway</html>")
    assert "bad gateway" in json.loads(body)["error"]["message"]


def test_log_probabilities_are_shown_if_requested() -> None:
    entry = {"token": "te", "bytes": [116, 101], "logprob": -0.5, "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": "te"}, "logprobs": {"content": [entry]}}
    stream = b"data: " + json.dumps(HEAD | {"choices": [choice]}).encode() + b"\n\n"
    stream += ending("stop")
    for include, expected in ((["message.output_text.logprobs"], [entry]), ([], [])):
        events = read(translation_of("/v1/responses", include=include).events(stream))
        [delta] = [payload for name, payload in events if name.endswith("output_text.delta")]
        assert delta["logprobs"] == expected
        message = events[-1][1]["response"]["output"][0]
        assert message["content"][0]["logprobs"] == expected


def logprob(token: str) -> Json:
    return {"token": token, "bytes": None, "logprob": -0.5, "top_logprobs": []}


def with_logprobs(delta: Json, *tokens: str) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": {"content": [*map(logprob, tokens)]}}
    return b"data: " + json.dumps(HEAD | {"choices": [choice]}).encode() + b"\n\n"


def test_log_probabilities_of_reasoning_and_calls_open_no_message() -> None:
    deltas = [*DELTAS[:3], {}, {"content": ""}, *DELTAS[3:5], {}, *DELTAS[5:7], {}, *DELTAS[7:], {}]
    stream = b"".join(with_logprobs(delta, str(i)) for i, delta in enumerate(deltas))
    shown = translation_of("/v1/responses", include=["message.output_text.logprobs"])
    plain = b"".join(map(chunk, DELTAS)) + ending("tool_calls")
    output = read(shown.events(stream + ending("tool_calls")))[-1][1]["response"]["output"]
    # Tokens 3 and 4 precede their text. 0, 8 and later ones belong to reasoning and calls.
    expected = [*map(logprob, ("3", "4", "5", "6", "7"))]
    assert output[1]["content"][0].pop("logprobs") == expected
    without = read(translation_of("/v1/responses").events(plain))[-1][1]["response"]["output"]
    without[1]["content"][0].pop("logprobs")
    assert output == without


def test_log_probabilities_of_a_complete_call_open_no_message() -> None:
    call = BREW | {"function": {"name": "brew", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "logprobs": {"content": [logprob("brew")]}}
    body = json.dumps(HEAD | {"choices": [choice | {"finish_reason": "tool_calls"}]}).encode()
    translation = translation_of("/v1/responses", include=["message.output_text.logprobs"])
    output = json.loads(translation.complete(200, body)[1])["output"]
    assert [item["type"] for item in output] == ["function_call"]


def test_an_answer_without_text_has_its_log_probabilities() -> None:
    translation = translation_of("/v1/responses", include=["message.output_text.logprobs"])
    stream = with_logprobs({"content": ""}, "<eos>") + ending("stop")
    [message] = read(translation.events(stream))[-1][1]["response"]["output"]
    assert message["content"][0]["text"] == ""
    assert message["content"][0]["logprobs"] == [logprob("<eos>")]


def test_a_call_in_a_namespace_has_its_own_name() -> None:
    spawn = {"type": "function", "name": "spawn"}
    tools = [{"type": "namespace", "name": "agents", "description": "", "tools": [spawn]}]
    function = {"name": "agents__spawn", "arguments": "{}"}
    stream = chunk({"tool_calls": [BREW | {"function": function}]}) + ending("tool_calls")
    events = read(translation_of("/v1/responses", tools=tools).events(stream))
    [item] = events[-1][1]["response"]["output"]
    assert (item["namespace"], item["name"]) == ("agents", "spawn")
