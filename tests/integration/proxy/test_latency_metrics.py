"""The proxy's latency metrics of streams: time between tokens, and requests that met their
objectives."""

from __future__ import annotations

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, post

STREAM = {**BODY, "stream": True}


async def metric(s: FakeDeployment, name: str) -> dict[str, float]:
    """Labels of a metric's samples -> their values."""
    async with httpx.AsyncClient(base_url=s.url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    found = [line.removeprefix(f"mooncake_proxy_{name}").rsplit(" ", 1) for line in lines]
    samples = [line for line in lines if line.startswith(f"mooncake_proxy_{name}")]
    return {
        labels: float(value)
        for (labels, value), line in zip(found, lines, strict=True)
        if line in samples
    }


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_time_between_tokens_is_observed(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(flow=flow) as s:
            s.decode.behaviour.token_delay_s = 0.03
            await post(s, STREAM)
            gaps = await metric(s, "time_between_tokens_seconds_count")
            # five tokens in one network chunk each: four gaps and the end
            assert 4 <= gaps[""] <= 6
            assert (await metric(s, "time_between_tokens_seconds_sum"))[""] >= 0.06
            await post(s, BODY)
            assert await metric(s, "time_between_tokens_seconds_count") == gaps, "no stream"

    uvloop.run(main())


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_time_to_first_token_is_of_streams(flow: str) -> None:
    """One of 400 tokens that is not streamed would count with the time of all of them."""

    async def main() -> None:
        async with fake_deployment(flow=flow) as s:
            await post(s, STREAM)
            first = await metric(s, "time_to_first_token_seconds_count")
            assert first == {"": 1}
            await post(s, BODY)
            assert await metric(s, "time_to_first_token_seconds_count") == first

    uvloop.run(main())


def test_slo_results_are_counted_by_class() -> None:
    async def main() -> None:
        async with fake_deployment(slo_ttft_s=60.0, slo_tbt_s=1e-9) as s:
            s.decode.behaviour.token_delay_s = 0.03  # otherwise all tokens may arrive in one chunk
            await post(s, STREAM)
            await post(s, {**STREAM, "priority": 1000})
            await post(s, BODY)
            s.decode.behaviour.die_after = 2
            await post(s, STREAM)
            s.prefill.behaviour.status = 400
            await post(s, STREAM)
            assert await metric(s, "slo_requests_total") == {
                '{class="interactive",objective="ttft",met="true"}': 1,
                '{class="interactive",objective="tbt",met="false"}': 2,
                '{class="batch",objective="ttft",met="true"}': 1,
                '{class="batch",objective="tbt",met="false"}': 1,
                '{class="interactive",objective="ttft",met="false"}': 1,
            }

    uvloop.run(main())


def test_no_slo_metrics_without_objectives() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            await post(s, STREAM)
            assert await metric(s, "slo_requests_total{") == {}

    uvloop.run(main())
