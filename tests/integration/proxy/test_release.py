"""KV that no D will fetch is released under every id that P holds it by, one per choice."""

from __future__ import annotations

from typing import Any

import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, STREAM, post, send_raw

from mooncake_proxy.api.openai_bodies import KVTransferParams, kv_transfer_params_decoder

HELD = [f"p0:abc/{index}" for index in range(3)]


async def all_released(s: FakeDeployment) -> None:
    await s.prefill.wait_for(lambda: sorted(s.prefill.released) == HELD)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_unreachable_decode_instances_release_kv(body: dict[str, Any]) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.publish_topologies(splits_choices=True)
            await s.decode.kill()
            await post(s, body | {"n": 3})
            await all_released(s)

    uvloop.run(main())


@pytest.mark.parametrize("stage", ["gap", "decode"])
def test_client_disconnect_releases_kv(stage: str) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.publish_topologies(splits_choices=True)
            behaviour = s.decode.behaviour
            behaviour.hangs, behaviour.hang_after = (stage == "gap"), 2
            reader, writer = await send_raw(s, STREAM | {"n": 3})
            await s.decode.wait_for(lambda: bool(s.decode.generated))
            if stage == "decode":
                await reader.readuntil(b" t1")
            writer.transport.abort()
            await all_released(s)
            await s.decode.wait_for(lambda: s.decode.cut_off == ["abc"])

    uvloop.run(main())


def test_completed_answers_release_nothing() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.publish_topologies(splits_choices=True)
            answer = await post(s, BODY | {"n": 3})
            assert len(answer.json()["choices"]) == 3
            await s.app.router.close()
            assert s.prefill.released == []

    uvloop.run(main())


@pytest.mark.parametrize("status", [404, 405, 500])
def test_instance_without_abort_is_logged_once(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has no abort endpoint, so every request whose KV is never fetched would log it."""

    async def main() -> None:
        async with fake_deployment() as s:
            await s.decode.kill()
            s.prefill.behaviour.abort_status = status
            for _ in range(3):
                await post(s, BODY)
            await s.app.router.close()
            assert s.count("aborts", "rejected") == 3
            assert s.prefill.released == []

    uvloop.run(main())
    lines = [r.getMessage() for r in caplog.records if "abort" in r.getMessage()]
    if status == 500:
        assert len(lines) == 3
    else:
        [line] = lines
        assert "has no /abort" in line
        assert "until its lease expires (lease_seconds)" in line


@pytest.mark.parametrize("ends", ["unreachable", "client"])
def test_vllm_releases_kv_by_a_request_that_it_refuses(
    ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM has no abort endpoint, but gives a refused request's parameters to its connector."""

    async def main() -> None:
        async with fake_deployment(emits_first_token=True) as s:
            s.prefill.behaviour.abort_status = 404
            s.prefill.behaviour.continues_prompt = True
            if ends == "unreachable":
                await s.decode.kill()
                await post(s, BODY)
            else:
                s.decode.behaviour.hangs = True
                _, writer = await send_raw(s, STREAM)
                await s.decode.wait_for(lambda: bool(s.decode.generated))
                writer.transport.abort()
            await s.prefill.wait_for(lambda: len(s.prefill.generated) == 2)
            asked = s.prefill.generated[1].body
            assert asked["model"] == "mooncake-releases-kv"
            assert asked["kv_transfer_params"]["do_remote_prefill"]
            assert asked["kv_transfer_params"]["remote_request_id"] == "p0:abc"
            await s.app.router.close()
            assert s.count("aborts", "by_request") == 1

    uvloop.run(main())
    assert "abort" not in caplog.text


def facts(text: bytes) -> KVTransferParams:
    found = kv_transfer_params_decoder.decode(text)
    assert found is not None
    return found


def test_held_ids_include_every_choice() -> None:
    one = b'{"do_remote_prefill": true, "remote_request_id": "a"%b}'
    ended = b'{"do_remote_prefill": false, "finished_update": {}}'
    other = b'{"do_remote_prefill": true, "remote_request_id": "b"}'
    assert facts(one % b"").held_request_ids == ("a",)
    several = one % (b', "choices": [%b, %b, %b]' % (one % b"", ended, other))
    assert facts(several).held_request_ids == ("a", "b")
    assert facts(ended).held_request_ids == ()
