"""SGLang pairs behind the proxy: both halves receive one body and share a bootstrap room."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import uvloop
from support.proxy_conductor import check_nothing_is_reserved, conductor_of, settings
from support.proxy_fakes import text_of
from support.proxy_fakes_client import BODY, CHAT, STREAM, events_of, post, streamed_text
from support.sglang_pair import BOOTSTRAP_PORT, sglang_deployment

from mooncake_proxy.config import ConductorConfig, ProxyConfig, RequestClass
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.pool.instances import Role

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


def test_conductor_chooses_both_halves_and_knows_their_load() -> None:
    async def main() -> None:
        async with sglang_deployment(2, 2, **settings("cost", "sglang")) as s:
            s.decodes[0].behaviour.hang_after = s.decodes[1].behaviour.hang_after = 2
            async with (
                httpx.AsyncClient(base_url=s.url) as client,
                client.stream("POST", "/v1/completions", json=STREAM) as answer,
            ):
                await anext(answer.aiter_text())
                pairs = conductor_of(s).pairs
                assert len(pairs.conductor.ledger) == 1
                [routed] = conductor_of(s)._records.values()
                chosen = [pairs.instance(routed.slot(role)) for role in (Role.PREFILL, Role.DECODE)]
                [prefill], [decode] = (
                    [each for each in fakes if each.generated] for fakes in (s.prefills, s.decodes)
                )
                assert [each and each.name for each in chosen] == [prefill.url, decode.url]
            await decode.wait_for(lambda: bool(decode.cut_off))
            check_nothing_is_reserved(s)

    uvloop.run(main())


def test_half_that_is_lost_is_replaced_by_the_conductor() -> None:
    async def main() -> None:
        for lost in ("prefills", "decodes"):
            async with sglang_deployment(2, 2, **settings("cost", "sglang")) as s:
                await getattr(s, lost)[0].kill()
                for _ in range(4):
                    assert (await post(s, BODY)).status_code == 200
                assert len(getattr(s, lost)[1].generated) == 4
                check_nothing_is_reserved(s)

    uvloop.run(main())


def test_admission_refuses_before_a_room_is_opened() -> None:
    async def main() -> None:
        limits = RequestClass("default", "0.001", "inf")
        conductor = settings("cost", "sglang", admission="early", default_class=limits)
        async with sglang_deployment(**conductor) as s:
            answer = await post(s, BODY)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "slo_ttft"
            assert not s.prefill.generated
            assert not s.decode.generated

    uvloop.run(main())


def test_roles_that_servers_have_from_their_start_are_not_changed() -> None:
    wanted = {
        "flow": "sglang",
        "prefill_policy": "cost",
        "decode_policy": "cost",
        "slo_ttft_s": 1.0,
    }
    ProxyConfig(**wanted, conductor=ConductorConfig(role_changes="propose"))
    with pytest.raises(ConfigError, match="--role-changes allow: an instance of --flow sglang"):
        ProxyConfig(**wanted, conductor=ConductorConfig(role_changes="allow"))
