"""The push flow: D is asked first, posts to the metaserver, and only then is P asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop
from support.proxy_fakes import fake_deployment, post_json, text_of
from support.proxy_fakes_client import BODY, events_of, post, send_raw, streamed_text

from mooncake_proxy.errors import MalformedResponse


def test_prefiller_receives_params_posted_by_decoder() -> None:
    async def main() -> None:
        async with fake_deployment(flow="push") as s:
            answer = await post(s, BODY | {"stream": True})
            assert streamed_text(events_of(answer.text)) == text_of(5)
            [asked] = s.decode.generated
            params = asked.body["kv_transfer_params"]
            assert params["do_remote_prefill"] is True
            assert params["do_remote_decode"] is False
            assert s.decode.metaserver_statuses == [202]
            [prefilled] = s.prefill.generated
            assert prefilled.body["max_tokens"] == 1
            assert prefilled.body["stream"] is False
            assert prefilled.body["prompt"] == BODY["prompt"]
            assert prefilled.body["kv_transfer_params"]["remote_engine_id"] == "d0"
            assert prefilled.body["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]

    uvloop.run(main())


def test_repeated_post_is_acknowledged_without_second_prefill() -> None:
    async def main() -> None:
        async with fake_deployment(flow="push") as s:
            s.decode.behaviour.num_posts = 2
            await post(s, BODY)
            assert s.decode.metaserver_statuses == [202, 202]
            assert len(s.prefill.generated) == 1

    uvloop.run(main())


def test_post_is_acknowledged_before_prefill_completes() -> None:
    """The field's metaserver blocks the post, and with it one of D's few threads, for the whole
    prefill."""

    async def main() -> None:
        async with fake_deployment(flow="push") as s:
            s.prefill.behaviour.hangs = True
            _, writer = await send_raw(s, BODY)
            await s.prefill.wait_for(lambda: bool(s.prefill.generated))
            await _until(lambda: s.decode.metaserver_statuses == [202])
            writer.transport.abort()
            await s.decode.wait_for(lambda: s.decode.cut_off == ["abc"])

    uvloop.run(main())


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # the other side's metaserver call has no event
        await asyncio.sleep(0.002)


def test_second_attempt_reaches_prefiller() -> None:
    """The field's proxy answers the second post with 200 and sends nothing to P."""

    async def main() -> None:
        async with fake_deployment(num_decodes=2, flow="push", decode_policy="round-robin") as s:
            for fake in s.decodes:
                fake.behaviour.drops = True
            s.decodes[1].behaviour.drops = False
            for _ in range(2):
                assert (await post(s, BODY)).json()["choices"][0]["text"] == text_of(5)
            assert len(s.prefill.generated) == 2
            assert s.count("retries", "decode") == 1

    uvloop.run(main())


def test_decoder_lost_after_post_is_replaced_with_new_session() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2, flow="push", decode_policy="round-robin") as s:
            for fake in s.decodes:
                fake.behaviour.die_after = 0
            first = await post(s, BODY | {"stream": True})
            assert first.status_code == 502
            assert len(s.prefill.generated) == 2
            ids = [seen.headers["x-request-id"] for fake in s.decodes for seen in fake.generated]
            assert sorted(ids) == ["abc", "abc-1"]

    uvloop.run(main())


def test_failed_prefill_ends_decoder_request() -> None:
    async def main() -> None:
        async with fake_deployment(flow="push", local_prefill=False) as s:
            s.prefill.behaviour.status = 500
            answer = await post(s, BODY | {"stream": True})
            assert answer.status_code == 500
            await s.decode.wait_for(lambda: s.decode.cut_off == ["abc"])

    uvloop.run(main())


def test_failed_prefill_falls_back_to_decoder() -> None:
    async def main() -> None:
        async with fake_deployment(flow="push") as s:
            await s.prefill.kill()
            answer = await post(s, BODY)
            assert answer.json()["choices"][0]["text"] == text_of(5)
            assert "kv_transfer_params" not in s.decode.generated[-1].body

    uvloop.run(main())


@pytest.mark.parametrize("local_prefill", [True, False])
def test_prefiller_removed_while_decoder_waits_for_blocks_counts_as_failed(
    local_prefill: bool,
) -> None:
    async def main() -> None:
        async with fake_deployment(flow="push", local_prefill=local_prefill) as s:
            s.decode.behaviour.has_free_blocks = has_free_blocks = asyncio.Event()
            pending = asyncio.ensure_future(post(s, BODY))
            await s.decode.wait_for(lambda: bool(s.decode.generated))
            s.app.router.pool.remove(s.prefill.url)
            has_free_blocks.set()
            answer = await pending
            if local_prefill:
                assert answer.json()["choices"][0]["text"] == text_of(5)
                assert "kv_transfer_params" not in s.decode.generated[-1].body
                assert s.count("fallbacks", "no_live_prefill") == 1
            else:
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "no_live_prefill"

    uvloop.run(main())


def test_prefiller_failing_while_draining_falls_back_to_decoder() -> None:
    async def main() -> None:
        async with fake_deployment(flow="push") as s:
            s.prefill.behaviour.hangs = True
            pending = asyncio.ensure_future(post(s, BODY))
            await s.prefill.wait_for(lambda: bool(s.prefill.generated))
            s.app.router.pool.remove(s.prefill.url)
            for connection in tuple(s.app.client.connections):
                if connection.name == s.prefill.url and connection.is_busy:
                    connection.fail(MalformedResponse(s.prefill.url, "torn"))
            assert (await pending).json()["choices"][0]["text"] == text_of(5)

    uvloop.run(main())


def test_second_prefiller_gets_same_params() -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=2, flow="push") as s:
            s.prefills[0].behaviour.drops = True
            for _ in range(6):
                assert (await post(s, BODY)).status_code == 200
            assert len(s.decode.generated) == 6

    uvloop.run(main())


def test_unknown_session_returns_404() -> None:
    async def main() -> None:
        async with fake_deployment(flow="push") as s:
            assert await post_json(f"{s.url}/v1/metaserver/{'0' * 32}", {}) == 404

    uvloop.run(main())
