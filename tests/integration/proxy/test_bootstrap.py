"""vLLM's own Mooncake connector: P returns no KV parameters, so the proxy names the transfer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from support.proxy_fakes import FakeDeployment, FakeInstance, fake_deployment, text_of
from support.proxy_fakes_client import BODY, STREAM, events_of, post, streamed_text

from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.pool.instances import InstanceSpec, Role


@asynccontextmanager
async def deployment_with_bootstrap(
    num_prefills: int = 1,
) -> AsyncIterator[tuple[FakeDeployment, FakeInstance]]:
    """A deployment whose P instances return no KV parameters, and their bootstrap server."""
    bootstrap = FakeInstance("boot")
    await bootstrap.start()
    port = int(bootstrap.url.rpartition(":")[2])
    async with fake_deployment(num_prefills=num_prefills, emits_first_token=True) as s:
        for fake in s.prefills:
            fake.behaviour.has_params = False
            spec = InstanceSpec(Origin.parse(fake.url), Role.PREFILL, bootstrap_port=port)
            s.app.router.pool.add(spec)
        yield s, bootstrap
    await bootstrap.kill()


def test_both_sides_get_one_transfer_id_and_decoder_the_bootstrap_address() -> None:
    async def main() -> None:
        async with deployment_with_bootstrap() as (s, bootstrap):
            for _ in range(2):
                answer = await post(s, STREAM)
                assert streamed_text(events_of(answer.text)) == text_of(5)
            names = set()
            for asked, decoded in zip(s.prefill.generated, s.decode.generated, strict=True):
                wanted = asked.body["kv_transfer_params"]
                assert wanted["do_remote_decode"] is True
                names.add(wanted["transfer_id"])
                assert decoded.body["kv_transfer_params"] == {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": wanted["transfer_id"],
                    "remote_engine_id": "engine-boot",
                    "remote_bootstrap_addr": bootstrap.url,
                    "first_token_delivered": False,
                }
            assert len(names) == 2, "the same request id twice, and two transfers"
            assert [seen.path for seen in bootstrap.seen] == ["/query"], "asked once"
            assert s.count("fallbacks", "no_params") == 0

    uvloop.run(main())


def test_bootstrap_request_ending_on_first_token_skips_decoder() -> None:
    async def main() -> None:
        async with deployment_with_bootstrap() as (s, _):
            s.prefill.behaviour.stops_at_first = True
            assert (await post(s, BODY)).json()["choices"][0]["text"] == text_of(1)
            assert not s.decode.generated

    uvloop.run(main())


def test_failed_prefiller_is_looked_up_again() -> None:
    async def main() -> None:
        async with deployment_with_bootstrap() as (s, bootstrap):
            await post(s, BODY)
            s.prefill.behaviour.status = 500
            assert (await post(s, BODY)).json()["choices"][0]["text"] == text_of(5)
            s.prefill.behaviour.status = 200
            await post(s, BODY)
            assert len(bootstrap.seen) == 2

    uvloop.run(main())


def test_prefiller_without_bootstrap_server_counts_as_failed() -> None:
    async def main() -> None:
        async with deployment_with_bootstrap() as (s, bootstrap):
            await bootstrap.kill()
            assert (await post(s, BODY)).json()["choices"][0]["text"] == text_of(5)
            assert not s.prefill.generated
            assert "kv_transfer_params" not in s.decode.generated[0].body
            assert s.count("attempts", s.prefill.url, "prefill", "connect_failed") == 1

    uvloop.run(main())
