"""The pull flow with failing instances and disconnecting clients.

Named after the defects seen in the field's example proxies, each of which has a test here.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment, text_of, word
from support.proxy_fakes_client import (
    BODY,
    CHAT,
    STREAM,
    events_of,
    post,
    streamed_text,
)

from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientLimits
from mooncake_proxy.pool.health_checks import HealthConfig
from mooncake_proxy.pool.instances import InstanceSpec, Role


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The OpenAI error object, which must have all of its fields."""
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_no_live_decoder_returns_503_without_prefill(stream: bool) -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=0) as s:
            answer = await post(s, BODY | {"stream": stream})
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "no_live_decode"
            assert s.prefill.generated == []

    uvloop.run(main())


def test_dead_decoder_returns_error_status_and_releases_prefill_kv() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            await s.decode.kill()
            answer = await post(s, BODY)
            assert answer.status_code == 502
            assert error_of(answer)["code"] == "connect_failed"
            await s.prefill.wait_for(lambda: s.prefill.released == ["p0:abc"])

    uvloop.run(main())


def test_decoder_that_cannot_take_over_a_stream_is_not_ejected() -> None:
    """The first token has been delivered, and that decoder would repeat it."""

    async def main() -> None:
        async with fake_deployment(num_decodes=2, eject_after=1) as s:
            dead, other = s.app.router.pool.live(Role.DECODE)
            other.set_spec(replace(other.spec, emits_first_token=True))
            await s.decodes[0].kill()
            for _ in range(20):
                events = events_of((await post(s, STREAM)).text)
                if not dead.is_up:
                    break
            assert (dead.is_up, other.is_up) == (False, True)
            assert streamed_text(events) == word(0), "of the request whose decoder was dead"
            assert "error" in events[-1]
            assert (await post(s, STREAM)).is_success

    uvloop.run(main())


def test_dead_decoder_after_first_token_sends_error_event() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            await s.decode.kill()
            answer = await post(s, STREAM)
            events = events_of(answer.text)
            assert streamed_text(events) == word(0)
            assert events[-1]["error"]["code"] == "connect_failed"
            await s.prefill.wait_for(lambda: s.prefill.released == ["p0:abc"])

    uvloop.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_decoder_failure_before_first_event_fails_over(stream: bool) -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2, decode_policy="round-robin") as s:
            for fake in s.decodes:
                for _ in range(2):
                    assert await _with_one_dead(s, fake, stream) == text_of(5)
            assert s.count("retries", "decode") >= 2

    async def _with_one_dead(s: FakeDeployment, fake: Any, stream: bool) -> str:
        fake.behaviour.drops = True
        answer = await post(s, BODY | {"stream": stream})
        fake.behaviour.drops = False
        assert answer.status_code == 200
        if not stream:
            return str(answer.json()["choices"][0]["text"])
        events = events_of(answer.text)
        assert len({event["id"] for event in events[:-1]}) == 1, "one answer has one id"
        return streamed_text(events)

    uvloop.run(main())


def test_second_attempt_has_new_request_id() -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=2, prefill_policy="round-robin") as s:
            for fake in s.prefills:
                fake.behaviour.status = 500
            await post(s, BODY)
            ids = [fake.generated[0].headers["x-request-id"] for fake in s.prefills]
            assert sorted(ids) == ["abc", "abc-1"]

    uvloop.run(main())


def test_dead_prefiller_fails_over_and_then_the_decoder_prefills() -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=2) as s:
            await s.prefills[0].kill()
            for _ in range(4):
                assert (await post(s, BODY)).json()["choices"][0]["text"] == text_of(5)
            await s.prefills[1].kill()
            answer = await post(s, BODY)
            assert answer.json()["choices"][0]["text"] == text_of(5)
            assert "kv_transfer_params" not in s.decode.generated[-1].body
            assert s.count("fallbacks", "prefill_failed") == 1

    uvloop.run(main())


def test_dead_prefiller_without_local_prefill_returns_error() -> None:
    async def main() -> None:
        async with fake_deployment(local_prefill=False) as s:
            await s.prefill.kill()
            answer = await post(s, BODY)
            assert answer.status_code == 502
            assert s.decode.generated == []

    uvloop.run(main())


def test_idle_decoders_share_the_requests() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2) as s:
            for _ in range(24):
                await post(s, BODY)
            counts = [len(fake.generated) for fake in s.decodes]
            assert min(counts) >= 4, counts

    uvloop.run(main())


@pytest.mark.parametrize("cut", ["two", "split"])
def test_error_event_split_over_packets_reaches_client(cut: str) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.decode.behaviour.error_after = 2
            s.decode.behaviour.cut = cut
            s.decode.behaviour.token_delay_s = 0.005
            answer = await post(s, STREAM)
            events = events_of(answer.text)
            assert streamed_text(events) == text_of(3)
            assert events[-1]["error"]["message"] == "broke"
            assert "[DONE]" not in events
            assert s.count("stream_errors") == 1

    uvloop.run(main())


def test_error_as_first_event_after_200_sets_response_status() -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=0, num_decodes=0, num_both=1) as s:
            s.decode.behaviour.error_after = 0
            answer = await post(s, STREAM)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "broke"

    uvloop.run(main())


@pytest.mark.parametrize(
    ("code", "status", "num_asked"),
    [("aborted", 409, 1), ("grammar_failed", 400, 1), ("overloaded", 502, 2)],
)
def test_stream_that_was_ended_for_good_is_not_tried_elsewhere(
    code: str, status: int, num_asked: int
) -> None:
    """What an operator has aborted must not come back on another instance, nor a grammar that is
    too expensive go through all of them."""

    async def main() -> None:
        async with fake_deployment(num_prefills=0, num_decodes=0, num_both=2) as s:
            for fake in s.decodes:
                fake.behaviour.error_after, fake.behaviour.error_code = 0, code
            answer = await post(s, STREAM)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert sum(len(fake.generated) for fake in s.decodes) == num_asked

    uvloop.run(main())


def test_decoder_lost_mid_stream_leaves_no_partial_event() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.decode.behaviour.cut = "split"
            s.decode.behaviour.die_after = 7
            answer = await post(s, STREAM)
            events = events_of(answer.text)
            assert text_of(5).startswith(streamed_text(events))
            assert events[-1]["error"]["code"] == "connection_lost"

    uvloop.run(main())


def test_silent_decoder_times_out() -> None:
    async def main() -> None:
        limits = ClientLimits(stall_timeout_s=0.3, first_byte_timeout_s=0.3)
        async with fake_deployment(client=limits) as s:
            s.decode.behaviour.hang_after = 2
            events = events_of((await post(s, STREAM)).text)
            assert streamed_text(events) == text_of(3)
            assert events[-1]["error"]["code"] == "timeout"

    uvloop.run(main())


@pytest.mark.parametrize("status", [400, 404, 422])
def test_client_error_is_not_retried(status: int) -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=2) as s:
            for fake in s.prefills:
                fake.behaviour.status = status
            answer = await post(s, STREAM)
            assert answer.status_code == status
            assert answer.json() == {"error": {"message": "made to fail", "code": 1}}
            assert sum(len(fake.generated) for fake in s.prefills) == 1

    uvloop.run(main())


def test_busy_instance_is_retried_and_retry_after_forwarded() -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=2, local_prefill=False) as s:
            for fake in s.prefills:
                fake.behaviour.status = 429
                fake.behaviour.headers = {"retry-after": "7"}
            answer = await post(s, BODY)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "7"
            assert [len(fake.generated) for fake in s.prefills] == [1, 1]

    uvloop.run(main())


def test_missing_kv_transfer_params_fall_back_to_local_prefill() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.prefill.behaviour.has_params = False
            answer = await post(s, STREAM)
            assert streamed_text(events_of(answer.text)) == text_of(5)
            assert "kv_transfer_params" not in s.decode.generated[0].body
            assert s.count("fallbacks", "no_params") == 1
            [prefiller] = [i for i in s.app.router.pool if i.name == s.prefill.url]
            assert prefiller.warned == {"no_params"}

    uvloop.run(main())


def test_no_key_means_no_authorization_header() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            await post(s, BODY)
            assert "authorization" not in s.prefill.generated[0].headers

    uvloop.run(main())


def test_dead_instance_is_marked_down_and_recovers() -> None:
    async def main() -> None:
        health = HealthConfig(interval_s=0.02, timeout_s=0.5, rise=2, fall=2)
        async with fake_deployment(num_decodes=2, health=health) as s:
            await s.decodes[0].kill()
            await _until(lambda: len(s.app.router.pool.live(_decode())) == 1)
            for _ in range(6):
                assert (await post(s, BODY)).status_code == 200
            await s.decodes[0].start()
            await _until(lambda: len(s.app.router.pool.live(_decode())) == 2)

    uvloop.run(main())


def test_repeated_request_failures_eject_instance() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2, eject_after=2) as s:
            s.decodes[0].behaviour.drops = True
            for _ in range(20):
                assert (await post(s, BODY)).status_code == 200
            assert len(s.decodes[0].generated) == 2

    uvloop.run(main())


def test_retries_stay_within_their_budget() -> None:
    async def main() -> None:
        settings = {"retry_ratio": 0.0, "retry_reserve": 2, "eject_after": 0}
        async with fake_deployment(num_prefills=2, local_prefill=False, **settings) as s:
            for fake in s.prefills:
                fake.behaviour.status = 500
            for _ in range(10):
                assert (await post(s, BODY)).status_code == 500
            assert sum(len(fake.generated) for fake in s.prefills) == 12

    uvloop.run(main())


def test_chat_without_live_prefiller_is_answered() -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=0) as s:
            answer = await post(s, CHAT | {"stream": True}, "/v1/chat/completions")
            assert streamed_text(events_of(answer.text)) == text_of(5)
            assert s.count("fallbacks", "no_live_prefill") == 1

    uvloop.run(main())


def _decode() -> Any:
    from mooncake_proxy.pool.instances import Role

    return Role.DECODE


async def _until(condition: Any) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110  # the proxy sends no signal
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 5)


def test_proxy_out_of_descriptors_does_not_mark_instances_down() -> None:
    async def main() -> None:
        health = HealthConfig(interval_s=0.02, timeout_s=0.5, rise=2, fall=1)
        async with fake_deployment(num_prefills=2, health=health, eject_after=1) as s:
            states = {i.name: i for i in s.app.router.pool}
            for instance in states.values():
                instance.connections.close()

            async def refuse(*_: Any, **__: Any) -> None:
                raise OSError(errno.EMFILE, "Too many open files")

            loop = s.app.client.loop
            s.app.client.loop = SimpleNamespace(
                time=loop.time, create_task=loop.create_task, create_connection=refuse
            )
            answer = await post(s, BODY)
            assert answer.status_code == 503
            assert error_of(answer)["code"] == "out_of_sockets"
            await asyncio.sleep(0.1)
            assert all(instance.is_up for instance in states.values())
            s.app.client.loop = loop
            assert (await post(s, BODY)).status_code == 200

    uvloop.run(main())


def test_connection_lost_after_done_counts_as_complete_stream() -> None:
    """The client has the whole answer: an error event after [DONE] would tell it nothing, and would
    blame an instance for a failure that it did not cause."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        events = b'data: {"id":"x","choices":[{"index":0,"text":"a"}]}\n\ndata: [DONE]\n\n'
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        writer.write(b"%btransfer-encoding: chunked\r\n\r\n%x\r\n" % (head, len(events)))
        writer.write(events + b"\r\n")  # and no last chunk
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        spec = InstanceSpec(Origin("http", "127.0.0.1", port), Role.BOTH)
        async with fake_deployment(1, 1, instances=(spec,)) as s:
            answer = await post(s, STREAM)
            assert streamed_text(events_of(answer.text)) == "a"
            assert answer.text.endswith("data: [DONE]\n\n")
            attempts = s.app.router.metrics.attempts.values
            assert [outcome for _, _, outcome in attempts] == ["ok"]
        server.close()

    uvloop.run(main())
