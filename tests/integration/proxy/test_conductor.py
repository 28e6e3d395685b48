"""The conductor in the proxy, over real sockets: placement, reservations, explanations."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import uvloop
from support.proxy_conductor import check_nothing_is_reserved, conductor_of, settings
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, post

from mooncake_proxy.config import CONDUCTOR_POLICIES, ConductorConfig, ProxyConfig
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.pool.instances import Role
from mooncake_proxy.routing.conductor_fleet import ConductorFleet

IDS = list(range(100, 100 + 64 * 8))


@pytest.fixture(autouse=True)
def no_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore measured times: on a busy machine those of fake instances say nothing about real
    ones."""
    monkeypatch.setattr(ConductorFleet, "measure_prefill", lambda *args: None)


async def prefillers(s: FakeDeployment, prompt: list[int], times: int) -> set[str]:
    before = {fake.name: len(fake.generated) for fake in s.prefills}
    for _ in range(times):
        assert (await post(s, BODY | {"prompt": prompt})).status_code == 200
    return {fake.name for fake in s.prefills if len(fake.generated) > before[fake.name]}


@pytest.mark.parametrize("flow", ["pull", "push"])
@pytest.mark.parametrize("policy", ["cost", "mooncake", "cache-local"])
def test_prompt_goes_to_instance_with_its_prefix(policy: str, flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(3, 2, **settings(policy, flow)) as s:
            [home] = await prefillers(s, IDS, 1)
            assert await prefillers(s, [*IDS, 7, 8], 8) == {home}
            check_nothing_is_reserved(s)

    uvloop.run(main())


def test_restart_that_no_health_check_noticed_empties_the_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The instance answers with another engine id, but was never seen down."""

    async def main() -> None:
        async with fake_deployment(1, 1, **settings()) as s:
            await s.app.checker.check_all()
            await prefillers(s, IDS, 1)
            fleet, [fake] = conductor_of(s).pairs, s.prefills
            [instance] = s.app.router.pool.live(Role.PREFILL)
            s.app.router.prefixes.record((1,), instance.name)
            slot = fleet.slot(instance)
            assert slot is not None
            await s.app.checker.check_all()
            assert fleet.conductor.index.num_held(slot)
            assert s.app.router.prefixes.cached_tokens((1,))
            monkeypatch.setattr(fake, "_standing", lambda: {"engine_id": "another"})
            await s.app.checker.check_all()
            assert not fleet.conductor.index.num_held(slot)
            assert not s.app.router.prefixes.cached_tokens((1,))

    uvloop.run(main())


@pytest.mark.parametrize("policy", CONDUCTOR_POLICIES)
def test_every_policy_spreads_simultaneous_requests(policy: str) -> None:
    async def main() -> None:
        async with fake_deployment(2, 2, **settings(policy)) as s:
            for fake in s.prefills:
                fake.behaviour.delay_s = 0.05
            prompts = [[number] * 640 for number in range(8)]
            answers = await asyncio.gather(*(post(s, BODY | {"prompt": p}) for p in prompts))
            assert {answer.status_code for answer in answers} == {200}
            assert [len(fake.generated) for fake in s.prefills] == [4, 4]
            assert min(len(fake.generated) for fake in s.decodes) > 0
            check_nothing_is_reserved(s)

    uvloop.run(main())


def test_explain_lists_every_cost_term_and_outcome() -> None:
    async def main() -> None:
        async with (
            fake_deployment(2, 1, **settings()) as s,
            httpx.AsyncClient(base_url=s.url) as client,
        ):
            for name in ("first", "second"):
                headers = {"x-request-id": name}
                body = BODY | {"prompt": IDS, "stream": True}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200
            first = (await client.get("/conductor/explain?request=first")).json()
            second = (await client.get("/conductor/explain?request=second")).json()
            assert first["prefill"]["plan"] == "recompute"
            assert second["prefill"]["plan"] == "local"
            assert second["prefill"]["num_reused"] == len(IDS) - 1
            assert second["prefill"]["instance"] == first["prefill"]["instance"]
            assert second["prefill"]["instance"] in {fake.url for fake in s.prefills}
            assert second["decode"]["instance"] == s.decode.url
            assert second["outcome"]["is_whole"] is True
            assert second["outcome"]["ttft_s"] > 0
            unknown = await client.get("/conductor/explain?request=third")
            assert unknown.status_code == 404
            assert "third" in unknown.json()["error"]["message"]
            assert (await client.get("/conductor/explain")).status_code == 400

    uvloop.run(main())


def test_explain_without_conductor_returns_404() -> None:
    async def main() -> None:
        async with fake_deployment() as s, httpx.AsyncClient(base_url=s.url) as client:
            answer = await client.get("/conductor/explain?request=first")
            assert answer.status_code == 404
            assert "--policy cost" in answer.json()["error"]["message"]

    uvloop.run(main())


@pytest.mark.parametrize("flow", ["pull", "push"])
@pytest.mark.parametrize("side", ["prefills", "decodes"])
@pytest.mark.parametrize("fault", ["drops", "status"])
def test_failed_request_is_placed_elsewhere_and_releases_reservations(
    flow: str, side: str, fault: str
) -> None:
    async def main() -> None:
        async with fake_deployment(2, 2, eject_after=0, **settings(flow=flow)) as s:
            for fake in getattr(s, side)[:1]:
                if fault == "drops":
                    fake.behaviour.drops = True
                else:
                    fake.behaviour.status = 500
            for number in range(6):
                body = BODY | {"prompt": [number] * 200, "stream": bool(number % 2)}
                assert (await post(s, body)).status_code == 200
            check_nothing_is_reserved(s)

    uvloop.run(main())


def test_disconnects_and_instance_deaths_release_reservations() -> None:
    async def main() -> None:
        async with fake_deployment(2, 2, **settings()) as s:
            for fake in (*s.prefills, *s.decodes):
                fake.behaviour.delay_s = 0.3
            async with httpx.AsyncClient(base_url=s.url, timeout=0.1) as client:
                for number in range(4):
                    with pytest.raises(httpx.TimeoutException):
                        await client.post("/v1/completions", json=BODY | {"prompt": [number] * 90})
            running = [asyncio.ensure_future(post(s, BODY | {"prompt": IDS})) for _ in range(4)]
            for _ in range(500):
                if any(seen.body["prompt"] == IDS for p in s.prefills for seen in p.generated):
                    break
                await asyncio.sleep(0.01)
            for fake in s.prefills:
                await fake.kill()
            await asyncio.gather(*running)
            for _ in range(50):
                if not len(conductor_of(s).pairs.conductor.book):
                    break
                await asyncio.sleep(0.02)
            check_nothing_is_reserved(s)

    uvloop.run(main())


def test_both_role_instances_are_chosen_by_prefix() -> None:
    async def main() -> None:
        async with fake_deployment(0, 0, 3, **settings()) as s:
            for times in (1, 6):
                for _ in range(times):
                    assert (await post(s, BODY | {"prompt": IDS})).status_code == 200
            assert sorted(len(fake.generated) for fake in s.decodes) == [0, 0, 7]
            check_nothing_is_reserved(s)

    uvloop.run(main())


def test_removed_instance_is_forgotten() -> None:
    async def main() -> None:
        async with fake_deployment(2, 1, **settings()) as s:
            [home] = await prefillers(s, IDS, 1)
            pairs = conductor_of(s).pairs
            gone = next(fake for fake in s.prefills if fake.name == home)
            s.app.router.pool.drain(gone.url, then_remove=True)
            [other] = await prefillers(s, IDS, 1)
            assert other != home
            assert sorted(pairs.conductor.fleet.names.values()) == sorted(
                fake.url for fake in (*s.prefills, *s.decodes) if fake is not gone
            )

    uvloop.run(main())


def test_conductor_chooses_both_sides_or_neither() -> None:
    with pytest.raises(ConfigError, match="chooses both instances together"):
        ProxyConfig(prefill_policy="cost", conductor=ConductorConfig())
