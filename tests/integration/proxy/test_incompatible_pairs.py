"""Instances say in their health which peers they can't exchange KV with: nothing crosses these."""

from __future__ import annotations

import httpx
import pytest
import uvloop
from support.proxy_fakes import Stand, stand, text_of
from support.proxy_fakes_client import BODY, post

FLOWS = pytest.mark.parametrize("flow", ["pull", "push"])
NUM_REQUESTS = 12


async def ask(s: Stand) -> list[str]:
    """One request; who prefilled it, if it was not D itself, and who decoded it."""
    fakes = (*s.prefills, *s.decodes)
    before = [len(fake.generated) for fake in fakes]
    answer = await post(s, BODY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text_of(5)
    return [
        fake.name for fake, count in zip(fakes, before, strict=True) if len(fake.generated) > count
    ]


@FLOWS
def test_no_request_crosses_a_pair_that_refused(flow: str) -> None:
    """Whichever side says so; p2 fits nobody, d2 nobody either."""

    async def main() -> None:
        async with stand(num_prefills=3, num_decodes=3, flow=flow, decode_policy="random") as s:
            s.prefills[0].behaviour.refuses = ("d0", "d2")
            s.decodes[1].behaviour.refuses = ("p1", "p2")
            s.decodes[0].behaviour.refuses = ("p2",)
            s.decodes[2].behaviour.refuses = ("p1", "p2")
            await s.app.checker.check_all()
            for _ in range(NUM_REQUESTS):
                assert await ask(s) in (["p0", "d1"], ["p1", "d0"])

    uvloop.run(main())


@FLOWS
def test_where_no_pair_fits_decode_serves_alone_and_no_prefill_is_spent(flow: str) -> None:
    async def main() -> None:
        async with stand(flow=flow) as s:
            s.decode.behaviour.refuses = ("p0",)
            await s.app.checker.check_all()
            assert await ask(s) == ["d0"]
            assert s.count("fallbacks", "no_fitting_pair") == 1

    uvloop.run(main())


@FLOWS
def test_where_decode_must_not_prefill_it_is_503(flow: str) -> None:
    async def main() -> None:
        async with stand(flow=flow, local_prefill=False) as s:
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
def test_a_successor_that_fits_is_used_again(flow: str) -> None:
    async def main() -> None:
        async with stand(flow=flow) as s:
            s.decode.behaviour.refuses = ("p0",)
            await s.app.checker.check_all()
            assert await ask(s) == ["d0"]
            s.decode.behaviour.refuses = ("p0 as it was",)
            await s.app.checker.check_all()
            assert await ask(s) == ["p0", "d0"]

    uvloop.run(main())


def test_health_that_says_nothing_of_peers_is_good_health() -> None:
    async def main() -> None:
        async with stand() as s:
            for fake in (s.prefill, s.decode):
                fake.behaviour.refuses = None
            await s.app.checker.check_all()
            assert await ask(s) == ["p0", "d0"]

    uvloop.run(main())


TCP = {"transports": {"tcp": {}}, "must_match": {"model": "one"}}


@FLOWS
def test_a_pair_that_can_not_work_is_known_before_any_request(
    flow: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with stand(num_prefills=2, num_decodes=2, flow=flow, decode_policy="random") as s:
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
    said = [r.getMessage() for r in caplog.records if "is incompatible with" in r.getMessage()]
    assert len(said) == 2
    assert all("model differs" in line for line in said)


def test_no_pair_that_fits_means_no_prefill_is_spent() -> None:
    async def main() -> None:
        async with stand() as s:
            s.prefill.behaviour.topology = TCP
            s.decode.behaviour.topology = {**TCP, "transports": {"rdma": {}}}
            await s.app.checker.check_all()
            assert await ask(s) == ["d0"]
            assert s.count("fallbacks", "no_fitting_pair") == 1

    uvloop.run(main())


def test_who_publishes_nothing_is_used_as_before() -> None:
    async def main() -> None:
        async with stand() as s:
            s.decode.behaviour.topology = TCP
            await s.app.checker.check_all()
            assert await ask(s) == ["p0", "d0"]

    uvloop.run(main())
