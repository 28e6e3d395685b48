"""The live page in a real browser: headless Chromium, where one is installed."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest
import uvloop
from support.proxy_fakes import stand
from support.proxy_fakes_client import BODY, post

from mooncake_proxy.pool.health_checks import HealthConfig

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH")
def test_the_page_shows_instances_and_figures(tmp_path: Path) -> None:
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    flags += ["--virtual-time-budget=4000", "--dump-dom"]

    async def main() -> None:
        async with stand(num_decodes=2) as s:
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

    asyncio.run(main())


def test_what_the_pool_had_is_seen_by_tier() -> None:
    health = HealthConfig(interval_s=0.02)

    async def main() -> None:
        async with stand(health=health) as s, httpx.AsyncClient(base_url=s.url) as client:
            s.prefills[0].behaviour.kv_pool = {"saved": 9, "found": {"dram": 4, "ssd": 1}}
            s.decodes[0].behaviour.kv_pool = {"saved": "many"}  # some other engine's
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


def test_the_page_is_self_contained() -> None:
    async def main() -> None:
        async with stand() as s, httpx.AsyncClient(base_url=s.url) as client:
            page = await client.get("/")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "http://" not in page.text
            assert "https://" not in page.text
            view = (await client.get("/view")).json()
            assert [instance["state"] for instance in view["instances"]] == ["up", "up"]
            assert len(view["first_token"]["counts"]) == len(view["first_token"]["bounds"]) + 1

    uvloop.run(main())
