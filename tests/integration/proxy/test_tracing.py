"""Request spans, sent by the real exporter to a collector on loopback."""

from __future__ import annotations

import asyncio
import sys

import httpx
import pytest
import uvloop
from support.proxy_fakes import fake_deployment, text_of
from support.proxy_fakes_client import BODY, CHAT, STREAM, post, send_raw
from support.proxy_fakes_collector import attributes_of, collector

from mooncake_proxy.config import AdmissionConfig
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.ops.proxy_tracing import load_tracing

CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_request_is_one_trace_from_the_client_to_both_instances(flow: str) -> None:
    async def main() -> None:
        with collector() as collected:
            async with fake_deployment(flow=flow, otlp_endpoint=collected.url) as s:
                headers = {"traceparent": TRACEPARENT, "tracestate": "a=b", "x-request-id": "abc"}
                async with httpx.AsyncClient(base_url=s.url, headers=headers) as client:
                    assert (await client.post("/v1/completions", json=STREAM)).status_code == 200
                received = {fake.name: fake.generated[0].headers for fake in (s.prefill, s.decode)}
            assert set(collected.paths) == {"/v1/traces"}
            assert collected.resource["service.name"] == "mooncake-proxy"
            [request] = collected.named("text_completion m")
            assert request.parent_span_id.hex() == CLIENT_SPAN
            assert collected.children(request) == ["decode", "prefill"]
            assert {span.trace_id.hex() for span in collected.spans} == {CLIENT_TRACE}
            for leg, name in (("prefill", s.prefill.name), ("decode", s.decode.name)):
                [span] = collected.named(leg)
                [attempt] = [
                    a for a in collected.named("attempt") if a.parent_span_id == span.span_id
                ]
                assert (
                    received[name]["traceparent"] == f"00-{CLIENT_TRACE}-{attempt.span_id.hex()}-01"
                )
                assert received[name]["tracestate"] == "a=b"
            facts = attributes_of(request)
            assert facts["gen_ai.operation.name"] == "text_completion"
            assert facts["gen_ai.request.model"] == "m"
            assert facts["gen_ai.request.max_tokens"] == 5
            assert facts["http.response.status_code"] == 200
            assert facts["mooncake.request_id"] == "abc"

    uvloop.run(main())


def test_every_attempt_has_a_span_with_its_outcome() -> None:
    async def main() -> None:
        with collector() as collected:
            async with fake_deployment(
                num_prefills=2, prefill_policy="round-robin", otlp_endpoint=collected.url
            ) as s:
                for fake in s.prefills:
                    fake.behaviour.status = 500
                s.prefills[0].behaviour.status = 200
                for _ in range(2):
                    assert (await post(s, CHAT, "/v1/chat/completions")).status_code == 200
            assert len(collected.named("chat m")) == 2
            failed = [span for span in collected.named("attempt") if span.status.code == 2]
            assert [attributes_of(span)["error.type"] for span in failed] == ["rejected"]
            again = [
                span
                for span in collected.named("attempt")
                if span.parent_span_id == failed[0].parent_span_id and span is not failed[0]
            ]
            assert [attributes_of(span)["http.request.resend_count"] for span in again] == [1]

    uvloop.run(main())


def test_spans_show_queue_time_and_client_disconnect() -> None:
    async def main() -> None:
        with collector() as collected:
            async with fake_deployment(
                otlp_endpoint=collected.url, admission=AdmissionConfig(max_running=1)
            ) as s:
                s.decode.behaviour.hangs = True
                reader, writer = await send_raw(s, BODY)
                await s.decode.wait_for(lambda: len(s.decode.generated) == 1)
                second = asyncio.ensure_future(post(s, BODY))
                while s.app.admission.num_waiting == 0:  # noqa: ASYNC110  # no such event
                    await asyncio.sleep(0.005)
                s.decode.behaviour.hangs = False
                writer.transport.abort()
                assert (await second).json()["choices"][0]["text"] == text_of(5)
                del reader
            left, served = collected.named("text_completion m")
            assert attributes_of(left)["http.response.status_code"] == 499
            assert collected.children(left) == ["decode", "prefill"]
            assert collected.children(served) == ["decode", "prefill", "queue"]

    uvloop.run(main())


def test_client_trace_is_forwarded_without_tracing() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            async with httpx.AsyncClient(base_url=s.url) as client:
                await client.post(
                    "/v1/completions", json=BODY, headers={"traceparent": TRACEPARENT}
                )
            for fake in (s.prefill, s.decode):
                assert fake.generated[0].headers["traceparent"] == TRACEPARENT
            assert s.app.router.tracing is None

    uvloop.run(main())


def test_unreachable_collector_fails_no_request() -> None:
    async def main() -> None:
        async with fake_deployment(otlp_endpoint="http://127.0.0.1:9") as s:
            assert (await post(s, BODY)).json()["choices"][0]["text"] == text_of(5)

    uvloop.run(main())


def test_missing_opentelemetry_error_names_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"opentelemetry.sdk.trace.export is not installed; pip"):
        load_tracing("http://127.0.0.1:4318")
