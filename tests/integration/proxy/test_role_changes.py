"""Load metrics of prefill and decode, and instances that change their role when one side is
overloaded."""

from __future__ import annotations

import asyncio
import logging
import re

import httpx
import pytest
import uvloop
from support.proxy_conductor import check_nothing_is_reserved, conductor_of, settings
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, post

from mooncake_conductor.role_balance import RoleRule
from mooncake_proxy.config import ProxyConfig, RequestClass
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.pool.instances import Role
from mooncake_proxy.routing.role_watch import RoleWatch

SOON = RoleRule(hold_s=0.05)


def configured(mode: str) -> dict[str, object]:
    slo = RequestClass("default", "100")
    return settings("cost", role_changes=mode, default_class=slo) | {"slo_ttft_s": 0.1}


def watch_roles_often(s: FakeDeployment, mode: str) -> None:
    conductor = conductor_of(s)
    conductor.roles = RoleWatch(conductor.pairs, mode, 0.1, SOON)


def overload_prefill(s: FakeDeployment) -> None:
    """Give every P a queue of several hours."""
    conductor_of(s).pairs.sync_with_pool(s.app.router.now())
    fleet = conductor_of(s).pairs.conductor.fleet
    for slot in fleet.prefill_slots:
        fleet.queues.enter(int(slot), "long", 3600.0, 1, s.app.router.now())


async def gauges(s: FakeDeployment) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=s.url) as client:
        text = (await client.get("/metrics")).text
    found = re.findall(r'^(mooncake_proxy_\w+\{model="",role="\w+"\}) (\S+)$', text, re.M)
    return {name: float(value) for name, value in found}


def test_idle_decode_instance_becomes_prefill_instance() -> None:
    async def main() -> None:
        async with fake_deployment(1, 3, **configured("allow")) as s:
            watch_roles_often(s, "allow")
            assert (await post(s, BODY)).status_code == 200
            check_nothing_is_reserved(s)
            overload_prefill(s)
            pool = s.app.router.pool
            for _ in range(100):
                await asyncio.sleep(0.05)
                if len(pool.live(Role.PREFILL)) > 1:
                    break
            assert len(pool.live(Role.PREFILL)) >= 2
            changed = s.app.router.metrics.role_changes.values
            assert {role for _, role in changed} == {"prefill"}
            assert (await post(s, BODY)).status_code == 200
            assert len(pool.live(Role.DECODE)) >= 1

    uvloop.run(main())


def test_proposed_role_changes_are_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with fake_deployment(1, 3, **configured("propose")) as s:
            watch_roles_often(s, "propose")
            overload_prefill(s)
            with caplog.at_level(logging.WARNING):
                for _ in range(100):
                    await asyncio.sleep(0.02)
                    if "should become a prefill instance" in caplog.text:
                        break
            assert "short of prefill" in caplog.text
            assert len(s.app.router.pool.live(Role.DECODE)) == 3

    uvloop.run(main())


def test_autoscaler_metrics_show_load_of_both_sides() -> None:
    async def main() -> None:
        async with fake_deployment(2, 2, **configured("off")) as s:
            before = await gauges(s)
            assert before['mooncake_proxy_load{model="",role="prefill"}'] == 0.0
            overload_prefill(s)
            after = await gauges(s)
            assert after['mooncake_proxy_load{model="",role="prefill"}'] > 10
            assert after['mooncake_proxy_desired_instances{model="",role="prefill"}'] > 20
            assert after['mooncake_proxy_desired_instances{model="",role="decode"}'] == 1

    uvloop.run(main())


def test_load_metric_without_objective_is_rejected() -> None:
    with pytest.raises(ConfigError, match="wanted --slo-ttft in milliseconds"):
        ProxyConfig(**(configured("allow") | {"slo_ttft_s": None}))  # type: ignore[arg-type]
