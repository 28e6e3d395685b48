"""SGLang pairs behind the proxy: both halves receive one body and share a bootstrap room."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import uvloop
from support.proxy_fakes import text_of
from support.proxy_fakes_client import BODY, CHAT, STREAM, events_of, post, streamed_text
from support.sglang_pair import BOOTSTRAP_PORT, sglang_deployment

from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import ConfigError

CONTRACT = json.loads(
    (Path(__file__).parents[2] / "contract/proxy/sglang_request_fields.json").read_text()
)
TYPES = {"str": str, "int": int}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_both_halves_get_same_bootstrap_room(path: str, stream: bool) -> None:
    async def main() -> None:
        async with sglang_deployment() as s:
            body = {**(CHAT if "chat" in path else BODY), "stream": stream}
            answer = await post(s, body, path)
            if stream:
                assert streamed_text(events_of(answer.text)) == text_of(5)
            else:
                assert answer.status_code == 200
            [prefilled], [decoded] = s.prefill.generated, s.decode.generated
            for name, kind in CONTRACT["fields"].items():
                assert type(decoded.body[name]) is TYPES[kind]
                assert prefilled.body[name] == decoded.body[name]
            assert decoded.body["bootstrap_host"] == "127.0.0.1"
            assert decoded.body["bootstrap_port"] == BOOTSTRAP_PORT
            assert 0 <= decoded.body["bootstrap_room"] <= CONTRACT["room_limit"]
            assert prefilled.body["stream"] is False
            fields = {*CONTRACT["fields"], "stream"}
            assert {k: v for k, v in decoded.body.items() if k not in fields} == {
                k: v for k, v in body.items() if k != "stream"
            }

    uvloop.run(main())


def test_every_request_has_its_own_bootstrap_room() -> None:
    async def main() -> None:
        async with sglang_deployment() as s:
            for _ in range(20):
                await post(s, BODY)
            rooms = {seen.body["bootstrap_room"] for seen in s.decode.generated}
            assert len(rooms) == 20

    uvloop.run(main())


@pytest.mark.parametrize("request_body", [BODY, STREAM])
def test_failed_prefiller_is_replaced_and_its_decoder_released(
    request_body: dict[str, object],
) -> None:
    async def main() -> None:
        async with sglang_deployment(num_prefills=2, prefill_policy="round-robin") as s:
            bad, good = s.prefills
            bad.behaviour.status = 500
            for _ in range(2):  # one of the two chooses the failing one first
                answer = await post(s, request_body)
                assert answer.status_code == 200
                assert text_of(5).split()[-1] in answer.text
            assert len(bad.generated) == 1
            assert len(good.generated) == 2
            rooms = [seen.body["bootstrap_room"] for seen in s.decode.generated]
            assert len(set(rooms)) == len(rooms), "a new attempt, a new room"
            assert s.app.router.pool.live(s.app.router.pool.get(good.url).spec.role)

    uvloop.run(main())


def test_failed_decoder_is_replaced() -> None:
    async def main() -> None:
        async with sglang_deployment(num_decodes=2) as s:
            s.decodes[0].behaviour.drops = True
            for _ in range(2):
                answer = await post(s, BODY)
                assert answer.json()["choices"][0]["text"] == text_of(5)
            assert len(s.decodes[1].generated) == 2

    uvloop.run(main())


def test_unsupported_requests_are_rejected() -> None:
    async def main() -> None:
        async with sglang_deployment() as s:
            for more, words in (
                ({"n": 2}, "several answers"),
                ({"prompt": ["a", "b"]}, "prompt batch"),
                ({"echo": True}, "echo"),
            ):
                answer = await post(s, BODY | more)
                assert answer.status_code == 400
                assert words in answer.json()["error"]["message"]
            assert not s.prefill.generated
            assert not s.decode.generated
            await s.prefill.kill()
            answer = await post(s, BODY)
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "connect_failed"

    uvloop.run(main())


def test_client_disconnect_aborts_both_halves() -> None:
    async def main() -> None:
        async with sglang_deployment() as s:
            s.decode.behaviour.hang_after = 2
            async with (
                httpx.AsyncClient(base_url=s.url) as client,
                client.stream("POST", "/v1/completions", json=STREAM) as answer,
            ):
                await anext(answer.aiter_text())
            await s.decode.wait_for(lambda: bool(s.decode.cut_off))
            assert s.app.router.pool.get(s.prefill.url).num_running == 0

    uvloop.run(main())


def test_short_prompts_need_decoders_that_prefill() -> None:
    with pytest.raises(ConfigError, match="of --flow sglang compute no prompts"):
        ProxyConfig(flow="sglang", short_prompt_tokens=10)
