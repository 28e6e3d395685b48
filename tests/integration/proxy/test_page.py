"""The live page in a real browser: headless Chromium, where one is installed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest
import uvloop
from support.proxy_fakes import fake_deployment
from support.proxy_fakes_client import BODY, STREAM, post

from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.pool.health_checks import HealthConfig
from mooncake_proxy.pool.instance_reports import Compatibility, PoolUse, StoreLocation

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_page_shows_instances_and_figures(tmp_path: Path) -> None:
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    flags += ["--virtual-time-budget=4000", "--dump-dom"]

    async def main() -> None:
        async with fake_deployment(num_decodes=2) as s:
            for _ in range(3):
                await post(s, BODY)
            await s.decodes[1].kill()
            process = await asyncio.create_subprocess_exec(
                BROWSER,
                *flags,
                f"{s.url}/",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            output, _ = await asyncio.wait_for(process.communicate(), 50)
            page = output.decode()
            for fake in (*s.prefills, *s.decodes):
                assert f"<td>{fake.url}</td>" in page
            assert 'class="dot up"' in page
            assert '<b id="hits">43 %</b>' in page
            assert '<b id="errors">0</b>' in page
            assert '<p id="stale" role="status"></p>' in page
            assert page.count("<figure>") == 7

    asyncio.run(main())


def test_pool_hits_are_shown_by_tier() -> None:
    health = HealthConfig(interval_s=0.02)

    async def main() -> None:
        async with fake_deployment(health=health) as s, httpx.AsyncClient(base_url=s.url) as client:
            s.prefills[0].behaviour.kv_pool = {"saved": 9, "found": {"dram": 4, "ssd": 1}}
            s.decodes[0].behaviour.kv_pool = {"saved": "many"}  # metrics of another engine
            for _ in range(200):
                view = (await client.get("/view")).json()
                found = {each["name"]: each["kv_pool"] for each in view["instances"]}
                if any(found.values()):
                    break
                await asyncio.sleep(0.02)
            assert found == {
                s.prefills[0].url: {"saved": 9, "found": {"dram": 4, "ssd": 1}},
                s.decodes[0].url: None,
            }
            assert "chunks from the KV pool" in (await client.get("/")).text

    uvloop.run(main())


def test_history_is_kept_by_server_and_page_requests_new_samples() -> None:
    async def main() -> None:
        async with fake_deployment() as s, httpx.AsyncClient(base_url=s.url) as client:
            process = s.app.process
            for _ in range(3):
                await post(s, STREAM)  # others have no time to first token
            process.take_sample()
            history = (await client.get("/view")).json()["history"]
            assert {len(column) for column in history.values()} == {len(history["time"])}
            assert sum(history["answered"]) > 0
            assert max(p99 or 0.0 for p99 in history["ttft_p99"]) > 0
            later = {"since": history["time"][-1]}
            newer = (await client.get("/view", params=later)).json()["history"]["time"]
            assert all(time > later["since"] for time in newer)
            assert (await client.get("/view?since=yesterday")).status_code == 400

    uvloop.run(main())


def test_received_kv_is_shown_by_pair() -> None:
    async def main() -> None:
        health = HealthConfig(interval_s=0.02)
        async with fake_deployment(health=health) as s, httpx.AsyncClient(base_url=s.url) as client:
            sender = f"engine-{s.prefills[0].name}"
            received = {sender: 100, f"{sender}-dp1": 20, "engine-of-yesterday": 3}
            s.decodes[0].behaviour.bytes_received = received
            s.prefills[0].behaviour.bytes_received = {"some": "other engine's"}
            wanted = {(s.prefills[0].url, s.decodes[0].url): 120, ("(gone)", s.decodes[0].url): 3}
            found: dict[tuple[str, str], int] = {}
            for _ in range(1500):
                s.app.process.take_sample()
                pairs = (await client.get("/view")).json()["pairs"]
                found = {(pair["sender"], pair["receiver"]): pair["bytes"] for pair in pairs}
                if found == wanted:
                    break
                await asyncio.sleep(0.02)
            assert found == wanted

    uvloop.run(main())


def test_prometheus_targets_list_all_instances_and_stores() -> None:
    async def main() -> None:
        store = Origin.parse("http://10.0.0.1:7702")
        async with (
            fake_deployment(num_decodes=2, store_metrics=(store,)) as s,
            httpx.AsyncClient(base_url=s.url) as client,
        ):
            found = StoreLocation("10.0.0.2", 7701, "epoch"), None, "*:7703"
            for instance in s.app.router.pool:  # the same stores; fakes are on loopback
                others = PoolUse(*found), PoolUse(None, None, "127.0.0.1:7704"), PoolUse(*found)
                use = PoolUse(None, None, "no address", others)
                s.app.router.pool.note_compatibility(instance, Compatibility(kv_pool=use))
            answer = await client.get("/metrics/targets")
            assert answer.headers["content-type"] == "application/json"
            roles = {fake.url: "prefill" for fake in s.prefills}
            roles |= {fake.url: "decode" for fake in s.decodes}
            stores = (str(store), "http://10.0.0.2:7703", "http://127.0.0.1:7704")
            roles |= dict.fromkeys(stores, "store")
            assert answer.json() == [
                {
                    "targets": [url.removeprefix("http://")],
                    "labels": {
                        "role": role,
                        "__scheme__": "http",
                        "__metrics_path__": "/metrics",
                    },
                }
                for url, role in roles.items()
            ]

    uvloop.run(main())


def test_rejections_are_counted_by_reason() -> None:
    async def main() -> None:
        async with fake_deployment() as s, httpx.AsyncClient(base_url=s.url) as client:
            s.app.process.router.metrics.requests.add("/v1/completions", "429")
            s.app.process.router.metrics.rate_limited.add("team", "tokens")
            s.app.process.router.metrics.requests.add("/v1/completions", "429")
            assert (await client.get("/view")).json()["refusals"] == [
                {"what": "429 at /v1/completions", "count": 2},
                {"what": "API key team over its limit of tokens", "count": 1},
            ]

    uvloop.run(main())


def test_page_is_self_contained() -> None:
    async def main() -> None:
        async with fake_deployment() as s, httpx.AsyncClient(base_url=s.url) as client:
            page = await client.get("/")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            # an XML namespace, which nothing fetches
            loads_from = page.text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in loads_from
            assert "https://" not in page.text
            view = (await client.get("/view")).json()
            assert [instance["state"] for instance in view["instances"]] == ["up", "up"]
            assert view["objectives"] == {"ttft": None, "tbt": None}

    uvloop.run(main())
