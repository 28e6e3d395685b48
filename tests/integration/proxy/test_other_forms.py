"""Responses and Messages requests through the proxy: instances get chat requests, clients get the
response format of their API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment, text_of
from support.proxy_fakes_client import NO_TLS

from mooncake_proxy.api.api_keys import tenant_salt

Json = dict[str, Any]
BODIES: dict[str, Json] = {
    "/v1/responses": {"model": "m", "input": "hi", "max_output_tokens": 5},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hi"}],
    },
}


async def post(s: FakeDeployment, path: str, headers: Any = None, **more: Any) -> httpx.Response:
    body = BODIES[path.partition("?")[0]] | more
    async with httpx.AsyncClient(base_url=s.url, verify=NO_TLS) as client:
        return await client.post(path, json=body, headers=headers)


def payloads(text: str) -> list[Json]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def stream_text(found: list[Json]) -> str:
    """The concatenated text of a stream."""
    deltas = [each["delta"] for each in found if "delta" in each]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


def whole_text(answer: Json) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])


@pytest.mark.parametrize("flow", ["pull", "push"])
@pytest.mark.parametrize("path", BODIES)
def test_instances_receive_chat_requests(path: str, flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(flow=flow) as s:
            answer = await post(s, path)
            assert answer.status_code == 200, answer.text
            assert whole_text(answer.json()) == text_of(5)
            [asked], [decoded] = s.prefill.generated, s.decode.generated
            assert asked.path == decoded.path == "/v1/chat/completions"
            assert decoded.body["messages"] == [{"role": "user", "content": "hi"}]
            streamed = await post(s, path, stream=True)
            assert streamed.headers["content-type"] == "text/event-stream"
            found = payloads(streamed.text)
            assert stream_text(found) == text_of(5)
            assert found[-1]["type"] in ("response.incomplete", "message_stop")
            assert "[DONE]" not in streamed.text

    uvloop.run(main())


@pytest.mark.parametrize("path", BODIES)
def test_errors_have_the_format_of_the_api(path: str) -> None:
    async def main() -> None:
        async with fake_deployment(local_prefill=False) as s:
            refused = await post(s, path, n=2)
            assert refused.status_code == 400
            assert "n is not supported" in refused.json()["error"]["message"]
            s.decode.behaviour.status = s.prefill.behaviour.status = 429
            s.prefill.behaviour.error = {"error": {"message": "later", "type": "t", "code": 429}}
            upstream = await post(s, path)
            assert upstream.json()["error"]["message"] == "later"
            if path == "/v1/messages":
                assert refused.json()["type"] == upstream.json()["type"] == "error"
                assert refused.json()["error"]["type"] == "invalid_request_error"
                assert upstream.json()["error"]["type"] == "rate_limit_error"
            assert s.count("requests", path, "400") == 1

    uvloop.run(main())


@pytest.mark.parametrize("path", BODIES)
def test_broken_stream_ends_with_error(path: str) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.decode.behaviour.error_after = 2
            found = payloads((await post(s, path, stream=True)).text)
            assert found[-1]["type"] in ("response.failed", "error")

    uvloop.run(main())


def test_query_string_is_ignored_and_adds_no_metric_label() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            answer = await post(s, "/v1/messages?beta=true")
            assert whole_text(answer.json()) == text_of(5)
            assert s.count("requests", "/v1/messages", "200") == 1

    uvloop.run(main())


def test_key_is_accepted_in_anthropic_header() -> None:
    async def main() -> None:
        async with fake_deployment(api_keys=frozenset({"good"})) as s:
            for headers in ({"x-api-key": "bad"}, {}):
                refused = await post(s, "/v1/messages", headers)
                assert refused.status_code == 401
                assert refused.json()["error"]["type"] == "authentication_error"
            assert not s.prefill.generated
            answer = await post(s, "/v1/messages", {"x-api-key": "good"})
            assert answer.status_code == 200
            assert s.prefill.generated[0].headers["authorization"] == "Bearer good"

    uvloop.run(main())


def test_cache_salt_does_not_depend_on_key_header() -> None:
    salts = {
        tenant_salt({b"authorization": b"Bearer a"}, None),
        tenant_salt({b"x-api-key": b"a"}, None),
    }
    assert len(salts) == 1
    assert tenant_salt({b"x-api-key": b"b"}, None) not in salts


def test_client_disconnect_aborts_request_on_instances() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.decode.behaviour.token_delay_s = 0.05
            async with (
                httpx.AsyncClient(base_url=s.url, verify=NO_TLS) as client,
                client.stream(
                    "POST", "/v1/responses", json=BODIES["/v1/responses"] | {"stream": True}
                ) as answer,
            ):
                async for line in answer.aiter_lines():
                    if "output_text.delta" in line:
                        break
            for _ in range(200):
                if s.count("disconnects", "decode"):
                    return
                await asyncio.sleep(0.01)
            raise AssertionError("the request went on without its client")

    uvloop.run(main())
