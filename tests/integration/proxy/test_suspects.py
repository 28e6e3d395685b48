"""Requests that crash instances: failed after the second lost instance, then quarantined."""

from __future__ import annotations

import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment, text_of
from support.proxy_fakes_client import BODY, STREAM, post

from mooncake_proxy.http1.upstream_connection import ClientLimits


def num_reached(s: FakeDeployment) -> tuple[int, int]:
    """The number of requests that prefill and decode instances received."""
    return (
        sum(len(fake.generated) for fake in s.prefills),
        sum(len(fake.generated) for fake in s.decodes),
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["drops", "hangs"])
def test_request_fails_after_second_lost_instance(fault: str, stream: bool) -> None:
    async def main() -> None:
        limits = ClientLimits(first_byte_timeout_s=0.1)
        async with fake_deployment(num_prefills=4, num_decodes=4, client=limits) as s:
            for fake in (*s.prefills, *s.decodes):
                setattr(fake.behaviour, fault, True)
            answer = await post(s, BODY | {"stream": stream})
            assert answer.status_code == (502 if fault == "drops" else 504)
            assert num_reached(s) == (2, 0)
            assert s.count("suspects", "stopped") == 1

    uvloop.run(main())


def test_request_that_kills_prefillers_never_reaches_decoders() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.prefill.behaviour.drops = True
            assert (await post(s, BODY)).status_code == 502
            assert num_reached(s) == (1, 0)

    uvloop.run(main())


def test_decode_instances_count_too() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=4) as s:
            for fake in s.decodes:
                fake.behaviour.drops = True
            assert (await post(s, BODY)).status_code == 502
            assert num_reached(s) == (1, 2)

    uvloop.run(main())


def test_same_body_is_rejected_for_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=2) as s:
            for fake in s.prefills:
                fake.behaviour.drops = True
            await post(s, STREAM)
            for fake in s.prefills:
                fake.behaviour.drops = False
            refused = await post(s, STREAM)
            assert refused.status_code == 422
            assert refused.json()["error"]["code"] == "request_quarantined"
            assert 0 < int(refused.headers["retry-after"]) <= 60
            assert num_reached(s) == (2, 0)
            assert s.count("suspects", "refused") == 1
            other = await post(s, BODY | {"prompt": "another one"})
            assert other.json()["choices"][0]["text"] == text_of(5)

    uvloop.run(main())
    assert "quarantined" in caplog.text


def test_quarantined_body_never_reaches_restarted_instance() -> None:
    """With one P, the first loss fails the request and the second quarantines it."""

    async def main() -> None:
        async with fake_deployment() as s:
            s.prefill.behaviour.drops = True
            statuses = [(await post(s, BODY)).status_code for _ in range(4)]
            assert statuses == [502, 502, 422, 422]
            assert num_reached(s) == (2, 0)

    uvloop.run(main())


def test_instance_killed_over_a_reused_connection_counts_as_lost() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            assert (await post(s, BODY)).status_code == 200
            s.prefill.behaviour.dies = True
            assert (await post(s, BODY | {"prompt": "deadly"})).status_code == 502
            assert num_reached(s) == (2, 1)

    uvloop.run(main())
