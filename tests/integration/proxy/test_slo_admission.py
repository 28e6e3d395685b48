"""Admission control over real sockets: which requests are rejected, with which code, and how
clients handle it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest
import uvloop
from support.modelled_instances import modelled_deployment
from support.overload import overload
from support.proxy_conductor import check_nothing_is_reserved, conductor_of, settings
from support.proxy_fakes import fake_deployment, text_of
from support.proxy_fakes_client import BODY, events_of, post, streamed_text
from support.virtual_time import run_virtually

from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_proxy.config import RequestClass
from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.proxy_options import build_parser

STREAM = BODY | {"stream": True}


def admitting(ttft: str = "inf", tbt: str = "inf", mode: str = "predictive", **more: Any) -> Any:
    return settings(admission=mode, default_class=RequestClass("default", ttft, tbt), **more)


@pytest.mark.parametrize("mode", ["predictive", "early"])
def test_admitted_requests_meet_slo_at_ten_times_the_load(mode: str) -> None:
    reports = []

    async def main() -> None:
        reports.append(await overload(6.0, 10, mode))

    # in wall-clock time, stalls of a busy machine would count against the proxy
    run_virtually(main())
    [report] = reports
    assert len(report.ttft) > 40
    assert report.attainment >= 0.95
    assert report.num_cut == 0
    assert set(report.codes) == {"slo_ttft"}
    assert report.refused_within(1.0) <= 0.05
    assert all(1 <= seconds <= 60 for seconds in report.retry_after)


@pytest.mark.parametrize(
    ("limits", "code"),
    [(("0.001", "inf"), "slo_ttft"), (("inf", "0.001"), "slo_tbt"), (("0.01x", "inf"), "slo_ttft")],
)
def test_rejection_is_openai_429_and_reaches_no_instance(limits: Any, code: str) -> None:
    async def main() -> None:
        async with fake_deployment(1, 1, **admitting(*limits)) as s:
            answer = await post(s, STREAM)
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", code)
            assert not s.prefill.generated
            assert not s.decode.generated
            check_nothing_is_reserved(s)
            record = conductor_of(s).explain("abc")
            assert record["refusal"] == code

    uvloop.run(main())


def test_baseline_rejects_after_prefill_before_any_byte_and_releases_kv() -> None:
    async def main() -> None:
        async with fake_deployment(1, 1, **admitting("inf", "0.001", "baseline")) as s:
            answer = await post(s, STREAM)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "slo_tbt"
            assert len(s.prefill.generated) == 1
            assert not s.decode.generated
            await s.prefill.wait_for(lambda: bool(s.prefill.released))
            check_nothing_is_reserved(s)

    uvloop.run(main())


def test_headers_are_sent_after_decode_admission() -> None:
    async def main() -> None:
        async with fake_deployment(1, 2, max_attempts=1, **admitting()) as s:
            for fake in s.decodes:
                fake.behaviour.status, fake.behaviour.error = 503, {"error": {"message": "full"}}
            refused = await post(s, STREAM)
            assert refused.status_code == 503
            for fake in s.decodes:
                fake.behaviour.status = 200
            answer = await post(s, STREAM)
            assert streamed_text(events_of(answer.text)) == text_of(5)
            check_nothing_is_reserved(s)

    uvloop.run(main())


def test_classes_have_separate_objectives() -> None:
    async def main() -> None:
        classes = (RequestClass("strict", "0.001"), RequestClass("spare", is_best_effort=True))
        async with (
            fake_deployment(1, 1, **admitting(classes=classes)) as s,
            httpx.AsyncClient(base_url=s.url) as client,
        ):
            found = {}
            for name in ("strict", "spare", "unknown"):
                headers = {"x-request-class": name}
                answer = await client.post("/v1/completions", json=BODY, headers=headers)
                found[name] = answer.status_code
            assert found == {"strict": 429, "spare": 200, "unknown": 400}

    uvloop.run(main())


def test_openai_client_honours_retry_after_and_no_stream_is_cut() -> None:
    latency = LatencyModel(0.6, 0.0, 0.0, 0.01, 0.0, 0.0)

    async def ask(client: openai.AsyncOpenAI, prompt: list[int]) -> str:
        try:
            stream = await client.completions.create(
                model="m", prompt=prompt, max_tokens=4, stream=True
            )
            return "".join([part.choices[0].text async for part in stream])
        except openai.RateLimitError as exc:
            return exc.code

    async def main() -> None:
        async with modelled_deployment(1, 1, latency, **admitting("2000")) as s:
            client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="k")
            for number in range(4):  # the proxy learns the cost of a prefill
                await ask(client, [number] * 64)
            began = time.monotonic()
            count = s.count("requests", "/v1/completions", "429")
            answers = await asyncio.gather(*(ask(client, [n] * 64) for n in range(10, 18)))
            refusals = s.count("requests", "/v1/completions", "429") - count
            assert set(answers) <= {text_of(4), "slo_ttft"}
            assert text_of(4) in answers
            # Each of the eight sent at most three requests, and waited a second or more after a
            # rejection.
            assert 0 < refusals <= 3 * 8
            assert time.monotonic() - began > 1.0
            await client.close()
            check_nothing_is_reserved(s)

    uvloop.run(main())


def config(*arguments: str) -> Any:
    return config_from(build_parser().parse_args(["--backend-url", "http://b:1", *arguments]))


def test_objectives_are_read_from_options() -> None:
    found = config("--admission", "early", "--slo-ttft", "5x", "--slo-tbt", "50")
    assert found.conductor.policy == "least-loaded"
    assert (found.slo_ttft_s, found.slo_tbt_s) == (None, 0.05)
    assert found.conductor.default_class == RequestClass("default", "5x", "50")
    found = config("--policy", "cost", "--request-class", "batch:ttft=60000,tbt=9x,best-effort")
    assert found.conductor.classes == (RequestClass("batch", "60000", "9x", is_best_effort=True),)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--slo-ttft", "soon"), "wanted milliseconds"),
        (("--slo-ttft", "5x"), "wanted --admission"),
        (("--request-class", "a:ttft=1"), "wanted --admission"),
        (("--admission", "early", "--request-class", ":ttft=1"), "wanted NAME:"),
        (("--admission", "early", "--policy", "prefix"), "does not go together"),
    ],
)
def test_invalid_admission_options_are_rejected(arguments: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(*arguments)
