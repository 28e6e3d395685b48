"""Instances that are added, removed, drained and switched between roles while requests run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, FakeInstance, fake_deployment, text_of
from support.proxy_fakes_client import BODY, STREAM, events_of, post, streamed_text

from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool import pool_file
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.pool.kubernetes import (
    KubernetesConfig,
    KubernetesWatch,
    PodList,
    specs_of_pods,
)
from mooncake_proxy.pool.membership import InstanceDefaults
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.pool.pool_file import PoolFileWatch

ADMIN = {"authorization": "Bearer secret"}


async def change(s: FakeDeployment, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=s.url) as client:
        return await client.post("/instances", json=body, headers=ADMIN)


def test_changes_need_an_admin_key() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            assert (await change(s, operation="drain", url=s.decode.url)).status_code == 403
        async with fake_deployment(admin_keys=frozenset({"other"})) as s:
            answer = await change(s, operation="drain", url=s.decode.url)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"

    uvloop.run(main())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "operation is required"),
        ({"operation": "drain"}, "url is required"),
        ({"operation": "halt", "url": "h:1"}, "wanted add, drain, resume, remove, role"),
        ({"operation": "add", "url": "h:1", "role": "all"}, "wanted prefill, decode, both"),
        ({"operation": "add", "url": "h:1"}, "its role is missing (prefill, decode or both)"),
        ({"operation": "add", "url": "h:0", "role": "both"}, "wanted http://HOST:PORT"),
    ],
)
def test_impossible_changes_are_explained(body: dict[str, str], message: str) -> None:
    async def main() -> None:
        async with fake_deployment(admin_keys=frozenset({"secret"})) as s:
            answer = await change(s, **body)
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]

    uvloop.run(main())


def test_instance_is_added_and_removed_at_run_time() -> None:
    async def main() -> None:
        extra = FakeInstance("extra")
        await extra.start()
        async with fake_deployment(num_decodes=0, admin_keys=frozenset({"secret"})) as s:
            assert (await post(s, BODY)).status_code == 503
            added = await change(s, operation="add", url=extra.url, role="decode")
            assert added.json()["instance"]["role"] == "decode"
            assert (await post(s, BODY)).json()["choices"][0]["text"] == text_of(5)
            assert (await change(s, operation="remove", url=extra.url)).json() == {"instance": None}
            assert (await post(s, BODY)).status_code == 503
        await extra.kill()

    uvloop.run(main())


def test_invalid_change_returns_its_reason() -> None:
    async def main() -> None:
        async with fake_deployment(admin_keys=frozenset({"secret"})) as s:
            missing = await change(s, operation="drain", url="http://127.0.0.1:1")
            assert missing.status_code == 404
            assert s.decode.url in missing.json()["error"]["message"]
            assert (await change(s, operation="explode", url=s.decode.url)).status_code == 400
            assert (await change(s, operation="add", url="ftp://x", role="both")).status_code == 400
            assert (await change(s, operation="add", url=s.decode.url)).status_code == 400

    uvloop.run(main())


def test_drained_instance_completes_requests_and_gets_no_new_ones_under_load() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2, admin_keys=frozenset({"secret"})) as s:
            s.decodes[0].behaviour.token_delay_s = 0.02
            s.decodes[1].behaviour.status = 500
            running = asyncio.ensure_future(post(s, BODY | {"stream": True}))
            await s.decodes[0].wait_for(lambda: bool(s.decodes[0].generated))
            s.decodes[1].behaviour.status = 200
            await change(s, operation="drain", url=s.decodes[0].url, remove=True)
            others = [await post(s, BODY) for _ in range(4)]
            assert {answer.status_code for answer in others} == {200}
            assert streamed_text(events_of((await running).text)) == text_of(5)
            assert len(s.decodes[0].generated) == 1
            assert [i.name for i in s.app.router.pool.live(Role.DECODE)] == [s.decodes[1].url]
            assert len(s.app.router.pool) == 2

    uvloop.run(main())


def test_only_an_idle_instance_switches_its_role() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2, admin_keys=frozenset({"secret"})) as s:
            for fake in s.decodes:
                fake.behaviour.hangs = True
            running = asyncio.ensure_future(post(s, BODY))
            await asyncio.wait(
                [
                    asyncio.ensure_future(f.wait_for(lambda f=f: bool(f.generated)))
                    for f in s.decodes
                ],
                return_when=asyncio.FIRST_COMPLETED,
                timeout=5,
            )
            busy, idle = sorted(s.decodes, key=lambda fake: -len(fake.generated))
            refused = await change(s, operation="role", url=busy.url, role="prefill")
            assert refused.status_code == 409
            assert (await change(s, operation="role", url=idle.url, role="prefill")).is_success
            assert len(s.app.router.pool.live(Role.PREFILL)) == 2
            running.cancel()
            await asyncio.wait({running})

    uvloop.run(main())


def test_change_of_the_pool_file_during_the_start_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=0) as s:
            path = tmp_path / "pools.json"
            path.write_text('{"decode": ["http://first:1"]}')
            read = pool_file.parse_pool_file

            def read_and_change(data: bytes, name: str) -> list[InstanceSpec]:
                path.write_text('{"decode": ["http://second:1"]}')
                return read(data, name)

            watch = PoolFileWatch(str(path), s.app.process.pools)
            monkeypatch.setattr(pool_file, "parse_pool_file", read_and_change)
            watch.load()
            monkeypatch.undo()
            watch.poll_once()
            names = [i.name for i in s.app.router.pool if i.spec.role is Role.DECODE]
            assert names == ["http://second:1"]

    uvloop.run(main())


def test_pool_file_changes_are_applied(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2) as s:
            for fake in s.decodes:
                s.app.router.pool.remove(fake.url)
            path = tmp_path / "pools.yaml"
            watch = PoolFileWatch(str(path), s.app.process.pools)
            path.write_text(f"decode:\n  - {s.decodes[0].url}\n")
            watch.poll_once()
            assert [i.name for i in s.app.router.pool.live(Role.DECODE)] == [s.decodes[0].url]
            path.write_text(f"decode:\n  - url: {s.decodes[1].url}\n    emits_first_token: true\n")
            watch.poll_once()
            [instance] = s.app.router.pool.live(Role.DECODE)
            assert instance.name == s.decodes[1].url
            assert instance.spec.emits_first_token
            path.write_text("decode: [")
            watch.poll_once()
            assert len(s.app.router.pool.live(Role.DECODE)) == 1
            assert len(s.app.router.pool.live(Role.PREFILL)) == 1, "instances from flags stay"

    uvloop.run(main())


def test_labelled_pod_changes_are_applied() -> None:
    async def main() -> None:
        pods = [_pod("decode", 8101, ready=True), _pod("prefill", 8102, ready=False)]
        api = await asyncio.start_server(_api(pods), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{api.sockets[0].getsockname()[1]}"
        settings = {
            "kubernetes": "serving/app=llm",
            "kubernetes_api": url,
            "instance_defaults": InstanceDefaults(kv_events_port=5557),
        }
        async with fake_deployment(num_prefills=0, num_decodes=0, **settings) as s:
            [instance] = s.app.router.pool
            assert instance.name == "http://127.0.0.1:8101"
            assert instance.spec.kv_events_port == 5557
        api.close()

    uvloop.run(main())


def test_operators_role_of_pod_stays_until_label_changes() -> None:
    async def main() -> None:
        pods = [_pod("decode", 8101, ready=True)]
        api = await asyncio.start_server(_api(pods), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{api.sockets[0].getsockname()[1]}"
        pools = ModelPools(ClientContext())
        watch = KubernetesWatch(KubernetesConfig.parse("serving/app=llm", url), pools)
        try:
            await watch.poll_once()
            [instance] = pools
            pools.switch_role(instance.name, Role.PREFILL)
            await watch.poll_once()
            assert instance.spec.role is Role.PREFILL
            pods[0] = _pod("both", 8101, ready=True)
            await watch.poll_once()
            assert instance.spec.role is Role.BOTH
        finally:
            watch._connections.close()
            api.close()

    uvloop.run(main())


@pytest.mark.parametrize("port", ["²", "99999", "http", "9" * 5000])
def test_invalid_port_annotation_is_ignored(port: str) -> None:
    pod = _pod("decode", 8101, ready=True)
    pod["metadata"]["annotations"] = {"mooncake-hal/port": port}
    [found] = specs_of_pods(msgspec.convert({"items": [pod]}, PodList))
    assert found.origin.port == 8101


def _pod(role: str, port: int, *, ready: bool) -> dict[str, Any]:
    return {
        "metadata": {"name": role, "labels": {"app": "llm", "mooncake-hal/role": role}},
        "spec": {"containers": [{"ports": [{"containerPort": port}]}]},
        "status": {
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def _api(pods: list[dict[str, Any]]) -> Any:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /api/v1/namespaces/serving/pods?labelSelector=app%3Dllm ")
        body = msgspec.json.encode({"kind": "PodList", "items": pods})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    return serve


@pytest.mark.parametrize("operation", ["resume", "add"])
def test_ejected_instance_without_health_checks_returns_by_operator_only(operation: str) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"eject_after": 2, "admin_keys": frozenset({"secret"})}
        async with fake_deployment(num_decodes=2, **settings) as s:
            broken = s.decodes[0]
            broken.behaviour.drops = True
            for _ in range(20):
                await post(s, BODY)
            assert len(broken.generated) == 2
            broken.behaviour.drops = False
            for _ in range(20):
                await post(s, BODY)
            assert len(broken.generated) == 2
            response = await change(s, operation=operation, url=broken.url, role="decode")
            assert (
                response.json()["instance"] | {"state": "up", "error": ""}
                == response.json()["instance"]
            )
            for _ in range(40):
                assert (await post(s, BODY)).status_code == 200
            assert len(broken.generated) > 2

    uvloop.run(main())


def test_busy_instance_is_drained_before_role_change_by_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=2) as s:
            pool = s.app.router.pool
            for fake in s.decodes:
                pool.remove(fake.url)
            path = tmp_path / "pools.yaml"
            watch = PoolFileWatch(str(path), s.app.process.pools)
            first, second = (fake.url for fake in s.decodes)
            path.write_text(f"decode:\n  - {first}\n")
            watch.poll_once()
            s.decodes[0].behaviour.token_delay_s = 0.05
            running = asyncio.ensure_future(post(s, STREAM))
            await s.decodes[0].wait_for(lambda: bool(s.decodes[0].generated))
            path.write_text(f"prefill:\n  - {first}\ndecode:\n  - {second}\n")
            watch.poll_once()
            s.app.poll()
            assert [i.name for i in pool.live(Role.DECODE)] == [second], "the other entry is added"
            assert pool.get(first).state.value == "draining"
            assert streamed_text(events_of((await running).text)) == text_of(5)
            while len(pool.live(Role.PREFILL)) < 2:  # noqa: ASYNC110  # of the sweep
                await asyncio.sleep(0.01)
            assert pool.get(first).spec.role is Role.PREFILL

    uvloop.run(main())


def test_unresponsive_cluster_api_blocks_neither_start_nor_pool(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mooncake_proxy.pool.kubernetes.TIMEOUT_S", 0.1)
    monkeypatch.setattr("mooncake_proxy.pool.kubernetes.POLL_S", 0.05)

    async def main() -> None:
        pods = [_pod("decode", 8101, ready=True)]
        answers = _api(pods)
        is_silent = True

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if is_silent:
                await reader.read()
                writer.close()
            else:
                await answers(reader, writer)

        api = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{api.sockets[0].getsockname()[1]}"
        settings = {"kubernetes": "serving/app=llm", "kubernetes_api": url}
        async with fake_deployment(num_prefills=0, num_decodes=0, **settings) as s:
            assert not list(s.app.router.pool)
            is_silent = False
            while not list(s.app.router.pool):  # noqa: ASYNC110  # of the watch
                await asyncio.sleep(0.01)
            s.app.poll()
        api.close()

    uvloop.run(main())
    assert "cannot list pods" in caplog.text
