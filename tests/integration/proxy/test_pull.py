"""The pull flow over real sockets, with healthy instances."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import uvloop
from support.proxy_fakes import PROMPT_IDS, fake_deployment, text_of, token_id, word
from support.proxy_fakes_client import BODY, CHAT, STREAM, events_of, post, streamed_text


def test_whole_completion() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            answer = await post(s, BODY)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == text_of(5)
            assert answer.headers["x-request-id"] == "abc"
            [asked] = s.prefill.generated
            assert asked.body["max_tokens"] == 1
            assert asked.body["stream"] is False
            assert asked.body["kv_transfer_params"]["do_remote_decode"] is True
            assert asked.headers["x-request-id"] == "abc"
            [decoded] = s.decode.generated
            params = decoded.body["kv_transfer_params"]
            assert params["remote_request_id"] == "p0:abc"
            assert params["first_token_delivered"] is False
            assert decoded.body["max_tokens"] == 5
            assert decoded.headers["x-request-id"] == "abc"

    uvloop.run(main())


def test_id_of_the_body_names_the_request_at_both_instances() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            url = f"{s.url}/v1/completions"
            async with httpx.AsyncClient() as client:
                answer = await client.post(url, json=BODY | {"request_id": "mine"})
                refused = await client.post(url, json=BODY | {"request_id": "not safe"})
            assert answer.headers["x-request-id"] == "mine"
            for instance in (s.prefill, s.decode):
                assert [asked.headers["x-request-id"] for asked in instance.generated] == ["mine"]
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "request_id"

    uvloop.run(main())


@pytest.mark.parametrize("cut", ["one", "two", "split"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_is_one_coherent_answer(cut: str, path: str) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.decode.behaviour.cut = cut
            body = CHAT if "chat" in path else BODY
            options = {"stream": True, "stream_options": {"include_usage": True}}
            answer = await post(s, body | options, path)
            events = events_of(answer.text)
            assert answer.headers["content-type"] == "text/event-stream"
            assert streamed_text(events) == text_of(5)
            assert events[-1] == "[DONE]"
            assert events[-2]["usage"]["completion_tokens"] == 5
            assert events[0]["usage"] is None
            assert len({event["id"] for event in events[:-1]}) == 1
            assert len({event["created"] for event in events[:-1]}) == 1
            finishes = [e["choices"][0]["finish_reason"] for e in events[:-1] if e["choices"]]
            assert finishes[-1] == "length"
            assert set(finishes[:-1]) == {None}
            if "chat" in path:
                roles = [e["choices"][0]["delta"].get("role") for e in events[:-1] if e["choices"]]
                assert roles == ["assistant", *[None] * 5]
            assert s.decode.generated[0].body["kv_transfer_params"]["first_token_delivered"] is True
            assert "stream_options" not in s.prefill.generated[0].body

    uvloop.run(main())


def test_first_token_arrives_before_decoder_responds() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.decode.behaviour.hangs = True
            async with (
                httpx.AsyncClient(base_url=s.url) as client,
                client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer,
            ):
                chunk = await asyncio.wait_for(anext(answer.aiter_text()), 2)
                assert streamed_text(events_of(chunk)) == word(0)

    uvloop.run(main())


def test_first_token_repeated_by_decoder_is_sent_once() -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True) as s:
            answer = await post(s, BODY | {"stream": True})
            assert streamed_text(events_of(answer.text)) == text_of(5)

    uvloop.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_request_ending_on_first_token_skips_decoder(stream: bool) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.prefill.behaviour.stops_at_first = True
            s.prefill.behaviour.first_text = ""
            options = {"stream": stream, "stream_options": {"include_usage": True}}
            answer = await post(s, CHAT | options, "/v1/chat/completions")
            assert s.decode.generated == []
            if not stream:
                assert answer.json()["choices"][0]["finish_reason"] == "stop"
                return
            events = events_of(answer.text)
            assert events[-1] == "[DONE]"
            assert events[-2]["usage"]["completion_tokens"] == 1
            assert events[-3]["choices"][0]["finish_reason"] == "stop"

    uvloop.run(main())


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_ending_on_first_token_has_requested_token_ids(
    path: str, is_asked: bool, recomputes: bool
) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, recomputes=recomputes) as s:
            s.prefill.behaviour.stops_at_first = s.prefill.behaviour.continues_prompt = True
            body = (CHAT if "chat" in path else BODY) | STREAM | {"return_token_ids": is_asked}
            events = events_of((await post(s, body, path)).text)
            choices = [choice for event in events[:-1] for choice in event["choices"]]
            assert streamed_text(events) == text_of(1)
            prompts = [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c]
            ids = [c["token_ids"] for c in choices if "token_ids" in c]
            assert prompts == [PROMPT_IDS] * is_asked
            assert ids == [[token_id(0)]] * is_asked

    uvloop.run(main())


def test_max_tokens_of_one_is_answered_by_prefiller() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            answer = await post(s, BODY | {"max_tokens": 1})
            assert answer.json()["choices"][0]["text"] == word(0)
            assert "kv_transfer_params" not in s.prefill.generated[0].body
            assert s.decode.generated == []

    uvloop.run(main())


def test_min_tokens_is_sent_only_if_client_sent_it() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            await post(s, BODY)
            await post(s, BODY | {"min_tokens": 4})
            first, second = s.prefill.generated
            assert "min_tokens" not in first.body
            assert second.body["min_tokens"] == 1
            assert s.decode.generated[1].body["min_tokens"] == 4

    uvloop.run(main())


def test_several_choices_stream_side_by_side() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.publish_topologies(splits_choices=True)
            answer = await post(s, BODY | {"stream": True, "n": 2, "logprobs": 1})
            assert s.prefill.generated[0].body["n"] == 2
            events = events_of(answer.text)[:-1]
            for index in (0, 1):
                mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
                assert "".join(choice["text"] for choice in mine) == text_of(5)
                tokens = [token for choice in mine for token in choice["logprobs"]["tokens"]]
                assert tokens == text_of(5).split()

    uvloop.run(main())


def test_model_and_tokenize_requests_are_forwarded_to_one_instance() -> None:
    async def main() -> None:
        async with fake_deployment() as s, httpx.AsyncClient(base_url=s.url) as client:
            assert (await client.get("/v1/models/m")).json() == {"id": "m"}
            unknown = await client.get("/v1/models/other")
            assert (unknown.status_code, unknown.json()) == (404, {"error": "unknown"})
            answer = await client.post("/tokenize", json={"prompt": "é"})
            assert answer.json() == {"tokens": list("é".encode())}
            assert (await client.get("/tokenize")).status_code == 405
            assert (await client.get("/tokenizer_info")).status_code == 200

    uvloop.run(main())


def test_models_metrics_health() -> None:
    async def main() -> None:
        async with fake_deployment() as s, httpx.AsyncClient(base_url=s.url) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
            health = (await client.get("/health")).json()
            assert [i["role"] for i in health["instances"]] == ["prefill", "decode"]
            assert (await client.get("/ready")).status_code == 200
            await post(s, BODY)
            text = (await client.get("/metrics")).text
            line = 'mooncake_proxy_requests_total{endpoint="/v1/completions",status="200"} 1'
            assert line in text.splitlines()
            assert "mooncake_proxy_stage_seconds_bucket" in text

    uvloop.run(main())


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_short_prompts_bypass_prefill_instances(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(flow=flow, short_prompt_tokens=40) as s:
            answer = await post(s, BODY | {"prompt": [7] * 40})
            assert answer.json()["choices"][0]["text"] == text_of(5)
            assert not s.prefill.generated
            assert "kv_transfer_params" not in s.decode.generated[0].body
            await post(s, BODY | {"prompt": [7] * 41})
            assert len(s.prefill.generated) == 1
            rule = s.app.router.short_prompts
            assert rule.num_tokens_in_flight == 0
            s.decode.behaviour.status = 400
            assert (await post(s, BODY | {"prompt": [7]})).status_code == 400
            assert rule.num_tokens_in_flight == 0, "whatever the finish reason"
            fallbacks = s.app.router.metrics.fallbacks.values
            assert fallbacks == {("short_prompt",): 2}

    uvloop.run(main())
