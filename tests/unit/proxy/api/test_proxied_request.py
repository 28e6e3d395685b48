"""Requests to instances: the client's own bytes plus the KV parameters, and nothing else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import Raw

from mooncake_proxy.api import openai_bodies
from mooncake_proxy.api.openai_bodies import OpenAIEndpoint
from mooncake_proxy.api.proxied_request import (
    RequestContext,
    UntranslatedRequest,
    estimate_prompt_tokens,
    forwarded_headers,
    new_request_id,
    prefill_body,
    pull_decode_body,
    request_id_of,
    with_delivery,
)
from mooncake_proxy.errors import BadRequest
from mooncake_proxy.http1.http_request import HttpRequest


def context_of(
    body: dict[str, Any] | bytes, endpoint: OpenAIEndpoint = OpenAIEndpoint.COMPLETION
) -> RequestContext:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    parsed, fields = openai_bodies.parse_request(raw)
    return RequestContext(None, endpoint, parsed, fields, "id", 0.0, 1.0, 1)  # type: ignore[arg-type]  # no socket


FORKED_WORKERS = """
import os
from mooncake_proxy.api.proxied_request import new_request_id
for has_drawn in (False, True):
    if has_drawn:
        print(new_request_id(), flush=True)
    for _ in range(2):
        if os.fork() == 0:
            os.write(1, f"{new_request_id()}\\n".encode())
            os._exit(0)
        os.wait()
"""


def test_fields_pass_through_byte_for_byte() -> None:
    body = b'{"prompt":"\\u00e4 x","seed":123456789012345678901234567890,"temperature":0.10}'
    sent = prefill_body(context_of(body))
    for piece in (b'"\\u00e4 x"', b"123456789012345678901234567890", b"0.10"):
        assert piece in sent


def test_prefill_request_has_one_token_and_no_stream() -> None:
    body = {"prompt": "x", "max_tokens": 9, "stream": True, "stream_options": {}, "min_tokens": 0}
    sent = json.loads(prefill_body(context_of(body)))
    assert sent["max_tokens"] == 1
    assert sent["stream"] is False
    assert sent["min_tokens"] == 0
    assert sent.keys() == {"prompt", "max_tokens", "stream", "min_tokens", "kv_transfer_params"}


def test_max_completion_tokens_is_sent_only_if_client_sent_it() -> None:
    sent = json.loads(prefill_body(context_of({"messages": [], "max_completion_tokens": 5})))
    assert sent["max_completion_tokens"] == 1


@pytest.mark.parametrize("params", ['{"a":[[1]]}', '{ "a" : [[1]] }', "{}"])
def test_params_of_prefiller_reach_decoder(params: str) -> None:
    sent = json.loads(
        pull_decode_body(context_of({"prompt": "x"}), Raw(params.encode()), delivered=True)
    )
    assert sent["kv_transfer_params"] == json.loads(params) | {"first_token_delivered": True}
    assert b'"first_token_delivered":false' in bytes(with_delivery(Raw(b"{}"), delivered=False))


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "the body must be a JSON object: input data was truncated", None),
        (b"{", "the body must be a JSON object: input data was truncated", None),
        (b"[]", "the body must be a JSON object: expected `object`, got `array`", None),
        (b'{"stream": 1}', "stream: expected `bool | null`, got `int`", "stream"),
        (b'{"max_tokens": "9"}', "max_tokens: expected `int | null`, got `str`", "max_tokens"),
        (
            b'{"max_tokens": 1' + b"0" * 400 + b"}",
            "max_tokens: expected `int` <= 9223372036854775807",
            "max_tokens",
        ),
        (
            b'{"stream_options": {"include_usage": 1}}',
            "stream_options.include_usage: expected `bool | null`, got `int`",
            "stream_options.include_usage",
        ),
        (
            b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "the body must be a JSON object: it is nested too deeply",
            None,
        ),
    ],
)
def test_invalid_bodies_are_explained_as_instances_do(
    body: bytes, message: str, param: str | None
) -> None:
    with pytest.raises(BadRequest) as refusal:
        openai_bodies.parse_request(body)
    assert (refusal.value.message, refusal.value.param) == (message, param)


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        ({"prompt": "x"}, None),
        ({"prompt": ["x"]}, None),
        ({"prompt": [1, 2, 3]}, None),
        ({"prompt": ["x", "y"]}, "prompt_batch"),
        ({"prompt": [[1], [2]]}, "prompt_batch"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "best_of": 2}, "beam_search"),
        ({"prompt": "x", "n": 2, "best_of": 2}, None),
        ({"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
    ],
)
def test_requests_that_prevent_disaggregation(body: dict[str, Any], obstacle: str | None) -> None:
    assert context_of(body).disaggregation_obstacle() == obstacle


def test_prompts_are_measured_in_tokens() -> None:
    ids = context_of({"prompt": list(range(100))})
    assert estimate_prompt_tokens(OpenAIEndpoint.COMPLETION, ids.parsed) == 100
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    chat = context_of({"messages": [{"role": "user", "content": [picture]}]}, OpenAIEndpoint.CHAT)
    assert estimate_prompt_tokens(OpenAIEndpoint.CHAT, chat.parsed) < 100


def test_request_ids() -> None:
    assert request_id_of({b"x-request-id": b"abc-1.2:3"}) == "abc-1.2:3"
    assert len({new_request_id() for _ in range(100)}) == 100
    for bad in (b"", b"a b", b"x" * 129, b"\xff"):
        assert len(request_id_of({b"x-request-id": bad})) == 32
        assert request_id_of({b"x-request-id": bad}, "body") == "body"
    assert request_id_of({b"x-request-id": b"header"}, "not safe") == "header"
    for bad_id in ("", "a b", "x" * 129, "\xe4"):
        with pytest.raises(BadRequest, match="letters, digits") as refused:
            request_id_of({}, bad_id)
        assert refused.value.param == "request_id"


def test_forked_workers_have_request_ids_of_their_own() -> None:
    command = [sys.executable, "-c", FORKED_WORKERS]
    ids = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert len(ids) == len({each[:16] for each in ids}) == 5


def test_only_present_headers_are_forwarded() -> None:
    assert forwarded_headers({b"cookie": b"x"}) == b""
    assert forwarded_headers({b"traceparent": b"t"}) == b"traceparent: t\r\n"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"\xff","prompt":"x"}',
        b'{"model":"m","prompt":"\xff"}',
        b'{"model":"m","prompt":"x","stop":"\xc3"}',
        b'{"model":"m","prompt":"\xed\xa0\x80"}',
        b'{"prompt":' + b"[" * 10_000,
        b"x",
    ],
    ids=["model", "prompt", "stop", "surrogate", "too deep", "no JSON"],
)
def test_unreadable_body_is_a_client_error(body: bytes) -> None:
    with pytest.raises(BadRequest) as failed:
        openai_bodies.parse_request(body)
    assert (failed.value.status, failed.value.code) == (400, "invalid_json")
    assert failed.value.message.startswith("the body must be a JSON object: ")


@pytest.mark.parametrize(("num_bytes", "is_interrupted"), [(10, False), (500_000, True)])
def test_other_requests_run_while_a_long_body_is_translated(
    num_bytes: int, is_interrupted: bool
) -> None:
    body = {"model": "m", "input": "x" * num_bytes}

    async def main() -> None:
        request, others = HttpRequest(Mock()), asyncio.Event()
        request.body = json.dumps(body).encode()
        asyncio.get_running_loop().call_soon(others.set)
        await UntranslatedRequest("/v1/responses").translate(request)
        assert others.is_set() is is_interrupted
        assert json.loads(request.body)["messages"][0]["content"] == body["input"]

    asyncio.run(main())


def test_invalid_long_body_is_a_client_error() -> None:
    async def main() -> None:
        request = HttpRequest(Mock())
        request.body = json.dumps({"model": 1, "input": "x" * 500_000}).encode()
        with pytest.raises(BadRequest) as failed:
            await UntranslatedRequest("/v1/responses").translate(request)
        assert failed.value.param == "model"

    asyncio.run(main())
