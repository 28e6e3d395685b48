"""Graceful shutdown of a proxy and of an instance."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, Json, fake_deployment, text_of
from support.proxy_fakes_client import BODY, CHAT, STREAM, events_of, post, streamed_text

from mooncake_proxy.ops.proxy_process import ShutdownSignals
from mooncake_proxy.pool.health_checks import HealthConfig

ENDING: Json = {"error": {"message": "it ends", "type": "server_error", "code": "shutting_down"}}


def leave(s: FakeDeployment, name: str) -> None:
    """Have the instance refuse new requests from now on."""
    [fake] = [fake for fake in (*s.prefills, *s.decodes) if fake.name == name]
    fake.behaviour.status = fake.behaviour.health = 503
    fake.behaviour.error = ENDING


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("flow", ["pull", "push"])
def test_draining_instance_gets_one_request_only(flow: str, name: str) -> None:
    """Another instance takes the refused request, and the retry budget stays untouched."""

    async def main() -> None:
        settings: Json = {"retry_ratio": 0.0, "retry_reserve": 0, "max_attempts": 1}
        settings |= {"prefill_policy": "round-robin", "decode_policy": "round-robin"}
        async with fake_deployment(num_prefills=2, num_decodes=2, flow=flow, **settings) as s:
            leave(s, name)
            for _ in range(12):
                answer = await post(s, BODY)
                assert answer.json()["choices"][0]["text"] == text_of(5), answer.text
            [leaving] = [fake for fake in (*s.prefills, *s.decodes) if fake.name == name]
            assert len(leaving.generated) == 1
            states = {i.name: i.state.value for i in s.app.router.pool}
            assert states.pop(leaving.url) == "down"
            assert set(states.values()) == {"up"}

    uvloop.run(main())


def test_running_requests_of_draining_instance_complete() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2) as s:
            s.decodes[0].behaviour.token_delay_s = 0.05
            # the draining one is the only one until its stream has started
            s.decodes[1].behaviour.status = 500
            running = asyncio.ensure_future(post(s, STREAM))
            await s.decodes[0].wait_for(lambda: bool(s.decodes[0].generated))
            s.decodes[1].behaviour.status = 200
            leave(s, "d0")
            s.decodes[0].behaviour.token_delay_s = 0.05
            assert (await post(s, BODY)).status_code == 200
            assert streamed_text(events_of((await running).text)) == text_of(5)

    uvloop.run(main())


def test_one_health_check_detects_announced_shutdown() -> None:
    async def main() -> None:
        health = HealthConfig(interval_s=0, fall=3, rise=1)
        async with fake_deployment(num_decodes=2, health=health) as s:
            await s.app.checker.check_all()
            leave(s, "d0")
            s.decodes[1].behaviour.health = 500
            await s.app.checker.check_all()
            states = {i.name: i.state.value for i in s.app.router.pool}
            assert states[s.decodes[0].url] == "down"
            assert states[s.decodes[1].url] == "up"
            assert "shutting_down" in s.app.router.pool.get(s.decodes[0].url).error
            s.decodes[0].behaviour.health = 200  # restarted
            await s.app.checker.check_all()
            assert s.app.router.pool.get(s.decodes[0].url).is_up

    uvloop.run(main())


def test_stopping_proxy_completes_running_and_rejects_new_requests() -> None:
    async def main() -> None:
        async with fake_deployment(shutdown_timeout_s=60.0) as s:
            s.decode.behaviour.token_delay_s = 0.05
            running = asyncio.ensure_future(post(s, STREAM))
            await s.decode.wait_for(lambda: bool(s.decode.generated))
            closing = asyncio.ensure_future(s.app.close())
            await asyncio.sleep(0)
            for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
                refused = await post(s, body, path)
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["connection"] == "close"
                assert refused.json()["error"]["code"] == "shutting_down"
            async with httpx.AsyncClient(base_url=s.url) as client:
                assert (await client.get("/ready")).status_code == 503
            assert streamed_text(events_of((await running).text)) == text_of(5)
            await closing
            assert len(s.decode.generated) == 1

    uvloop.run(main())


def test_stopping_proxy_waits_for_clients_to_read_their_answers() -> None:
    num_bytes = 16 * 1024 * 1024  # far more than the kernel buffers

    async def main() -> None:
        async with fake_deployment(shutdown_timeout_s=60.0) as s:
            s.prefill.behaviour.stops_at_first = True
            s.prefill.behaviour.first_text = "x" * num_bytes
            reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: p\r\ncontent-length: 14\r\n\r\n")
            writer.write(b'{"prompt":"x"}')
            await reader.readuntil(b"\r\n\r\n")
            closing = asyncio.ensure_future(s.app.close())
            try:
                await asyncio.wait({closing}, timeout=0.2)
                assert not closing.done()
                assert len(await reader.read()) > num_bytes
                await closing
            finally:
                writer.transport.abort()

    uvloop.run(main())


@pytest.mark.parametrize("is_forced", [False, True])
def test_requests_beyond_shutdown_timeout_are_aborted_with_error(*, is_forced: bool) -> None:
    """On both sides: closing the connection aborts the request on the instance as well."""

    async def main() -> None:
        async with fake_deployment(shutdown_timeout_s=60.0 if is_forced else 0.1) as s:
            s.decode.behaviour.hang_after = 2
            streamed = asyncio.ensure_future(post(s, STREAM))
            await s.decode.wait_for(lambda: len(s.decode.generated) == 1)
            whole = asyncio.ensure_future(post(s, BODY))
            s.decode.behaviour.hangs = True
            await s.decode.wait_for(lambda: len(s.decode.generated) == 2)
            stop = ShutdownSignals()
            stop.signal(10.0)
            if is_forced:
                stop.signal(11.5)
            await s.app.close(stop)
            last = events_of((await streamed).text)[-1]
            assert last["error"]["code"] == "shutting_down"
            assert (await whole).status_code == 503
            await s.decode.wait_for(lambda: len(s.decode.cut_off) == 2)

    uvloop.run(main())


def test_simultaneous_signals_count_as_one_stop() -> None:
    stop = ShutdownSignals()
    assert not stop.requested.is_set()
    for now in (10.0, 10.2, 10.9):  # a worker receives the terminal's signal and its parent's
        stop.signal(now)
    assert stop.requested.is_set()
    assert not stop.is_forced
    stop.signal(11.1)
    assert stop.is_forced
