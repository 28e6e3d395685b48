"""Instances publish with their health which peers are incompatible: no request is sent to such a
pair."""

from __future__ import annotations

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment, text_of
from support.proxy_fakes_client import BODY, post

FLOWS = pytest.mark.parametrize("flow", ["pull", "push"])
NUM_REQUESTS = 12


async def ask(s: FakeDeployment) -> list[str]:
    """Send one request; returns which P prefilled it (if D did not) and which D decoded it."""
    fakes = (*s.prefills, *s.decodes)
    before = [len(fake.generated) for fake in fakes]
    answer = await post(s, BODY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text_of(5)
    return [
        fake.name for fake, count in zip(fakes, before, strict=True) if len(fake.generated) > count
    ]


@FLOWS
def test_no_request_uses_an_incompatible_pair(flow: str) -> None:
    """Either side may report it; p2 is incompatible with every D, and d2 with every P."""

    async def main() -> None:
        async with fake_deployment(
            num_prefills=3, num_decodes=3, flow=flow, decode_policy="random"
        ) as s:
            s.prefills[0].behaviour.refuses = ("d0", "d2")
            s.decodes[1].behaviour.refuses = ("p1", "p2")
            s.decodes[0].behaviour.refuses = ("p2",)
            s.decodes[2].behaviour.refuses = ("p1", "p2")
            await s.app.checker.check_all()
            for _ in range(NUM_REQUESTS):
                assert await ask(s) in (["p0", "d1"], ["p1", "d0"])

    uvloop.run(main())


@FLOWS
def test_decode_prefills_locally_if_no_pair_is_compatible(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(flow=flow) as s:
            s.decode.behaviour.refuses = ("p0",)
            await s.app.checker.check_all()
            assert await ask(s) == ["d0"]
            assert s.count("fallbacks", "no_fitting_pair") == 1

    uvloop.run(main())


@FLOWS
def test_no_compatible_pair_without_local_prefill_returns_503(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(flow=flow, local_prefill=False) as s:
            s.decode.behaviour.refuses = ("p0",)
            await s.app.checker.check_all()
            answer = await post(s, BODY)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_fitting_pair"
            async with httpx.AsyncClient(base_url=s.url) as client:
                ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "no pair can exchange KV")

    uvloop.run(main())


@FLOWS
def test_compatible_restarted_instance_is_used_again(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(flow=flow) as s:
            s.decode.behaviour.refuses = ("p0",)
            await s.app.checker.check_all()
            assert await ask(s) == ["d0"]
            s.decode.behaviour.refuses = ("p0 as it was",)
            await s.app.checker.check_all()
            assert await ask(s) == ["p0", "d0"]

    uvloop.run(main())


def test_health_without_peer_report_is_healthy() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            for fake in (s.prefill, s.decode):
                fake.behaviour.refuses = None
            await s.app.checker.check_all()
            assert await ask(s) == ["p0", "d0"]

    uvloop.run(main())


TCP = {"transports": {"tcp": {}}, "must_match": {"model": "one"}}


@FLOWS
def test_incompatible_pair_is_known_before_any_request(
    flow: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with fake_deployment(
            num_prefills=2, num_decodes=2, flow=flow, decode_policy="random"
        ) as s:
            for fake in (*s.prefills, *s.decodes):
                fake.behaviour.topology = TCP
            other = {**TCP, "must_match": {"model": "two"}}
            s.prefills[1].behaviour.topology = s.decodes[1].behaviour.topology = other
            await s.app.checker.check_all()
            asked = [seen.path for fake in s.prefills for seen in fake.seen]
            assert asked.count("/kv/topology") == 2
            for _ in range(NUM_REQUESTS):
                assert await ask(s) in (["p0", "d0"], ["p1", "d1"])
            await s.app.checker.check_all()
            asked = [seen.path for fake in s.prefills for seen in fake.seen]
            assert asked.count("/kv/topology") == 2, "once per start of an instance"

    uvloop.run(main())
    messages = [r.getMessage() for r in caplog.records if "is incompatible with" in r.getMessage()]
    assert len(messages) == 2
    assert all("model differs" in line for line in messages)


def test_no_compatible_topology_starts_no_prefill() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.prefill.behaviour.topology = TCP
            s.decode.behaviour.topology = {**TCP, "transports": {"rdma": {}}}
            await s.app.checker.check_all()
            assert await ask(s) == ["d0"]
            assert s.count("fallbacks", "no_fitting_pair") == 1

    uvloop.run(main())


def test_instance_without_topology_is_used() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.decode.behaviour.topology = TCP
            await s.app.checker.check_all()
            assert await ask(s) == ["p0", "d0"]

    uvloop.run(main())
