"""Several models behind one proxy: requests are routed by `model`, and unknown models are
rejected."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import uvloop
from support.proxy_conductor import settings
from support.proxy_fakes import FakeDeployment, FakeInstance, fake_deployment
from support.proxy_fakes_client import BODY, post

from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.pool.pool_file import parse_pool_file
from mooncake_proxy.proxy_options import build_parser


def spec(fake: FakeInstance, role: Role, *models: str) -> InstanceSpec:
    return InstanceSpec(Origin.parse(fake.url), role, models=models)


def name_the_models(s: FakeDeployment) -> None:
    """The first pair serves `qwen`, also as `chatty`; the second `llama`."""
    pools = s.app.process.pools
    for fake in (*s.prefills, *s.decodes):
        pools.remove(fake.url)
    for position, names in enumerate((("qwen", "chatty"), ("llama",))):
        pools.add(spec(s.prefills[position], Role.PREFILL, *names))
        pools.add(spec(s.decodes[position], Role.DECODE, *names))


async def get(s: FakeDeployment, path: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=s.url) as client:
        return await client.get(path)


@pytest.mark.parametrize("conductor", [{}, settings("cost")])
def test_requests_go_to_the_pool_of_their_model(conductor: dict[str, object]) -> None:
    async def main() -> None:
        async with fake_deployment(2, 2, **conductor) as s:
            name_the_models(s)
            for model, position in (("qwen", 0), ("chatty", 0), ("llama", 1)):
                before = len(s.prefills[position].generated), len(s.decodes[position].generated)
                for _ in range(3):
                    assert (await post(s, BODY | {"model": model})).status_code == 200
                after = len(s.prefills[position].generated), len(s.decodes[position].generated)
                assert after == (before[0] + 3, before[1] + 3)

    uvloop.run(main())


@pytest.mark.parametrize("is_asked", [True, False], ids=["asked before", "never asked"])
@pytest.mark.parametrize("conductor", [{}, settings("cost")])
def test_model_without_its_last_instance_is_unavailable_and_not_unknown(
    conductor: dict[str, object], is_asked: bool
) -> None:
    async def main() -> None:
        async with fake_deployment(2, 2, **conductor) as s:
            name_the_models(s)
            pools, llama = s.app.process.pools, BODY | {"model": "llama"}
            if is_asked:
                assert (await post(s, llama)).status_code == 200
            for fake in (s.prefills[1], s.decodes[1]):
                pools.drain(fake.url, then_remove=True)
            refused = await post(s, llama)
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["code"] == "no_live_decode"
            listed = (await get(s, "/v1/models")).json()["data"]
            assert {"qwen", "chatty", "llama"} <= {card["id"] for card in listed}
            assert (await get(s, "/ready")).status_code == 200
            assert (await post(s, BODY | {"model": "qwen"})).status_code == 200
            for role, fake in ((Role.PREFILL, s.prefills[1]), (Role.DECODE, s.decodes[1])):
                pools.add(spec(fake, role, "llama"))
            assert (await post(s, llama)).status_code == 200

    uvloop.run(main())


def test_unknown_model_gets_openai_error() -> None:
    async def main() -> None:
        async with fake_deployment(2, 2) as s:
            name_the_models(s)
            answer = await post(s, BODY | {"model": "gpt"})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert error["code"] == "model_not_found"
            assert error["type"] == "invalid_request_error"
            assert error["param"] == "model"
            assert "`gpt`" in error["message"]
            nothing = {key: value for key, value in BODY.items() if key != "model"}
            unnamed = await post(s, nothing)
            assert unnamed.status_code == 400
            assert "chatty, qwen, llama" in unnamed.json()["error"]["message"]
            assert not s.prefills[0].generated
            assert (await get(s, "/v1/models/gpt")).status_code == 404

    uvloop.run(main())


def test_instance_without_model_name_serves_all_other_models() -> None:
    async def main() -> None:
        async with fake_deployment(3, 3) as s:
            name_the_models(s)
            pools = s.app.process.pools
            pools.add(spec(s.prefills[2], Role.PREFILL))
            pools.add(spec(s.decodes[2], Role.DECODE))
            assert (await post(s, BODY | {"model": "gpt"})).status_code == 200
            assert len(s.decodes[2].generated) == 1
            assert (await post(s, BODY | {"model": "llama"})).status_code == 200
            assert len(s.decodes[1].generated) == 1

    uvloop.run(main())


def test_all_models_are_listed() -> None:
    async def main() -> None:
        async with fake_deployment(2, 2) as s:
            name_the_models(s)
            listed = (await get(s, "/v1/models")).json()
            assert listed["object"] == "list"
            assert {card["id"] for card in listed["data"]} == {"qwen", "chatty", "llama"}
            assert {card["object"] for card in listed["data"]} == {"model"}
            assert (await get(s, "/ready")).status_code == 200
            shown = (await get(s, "/health")).json()["instances"]
            assert sorted(tuple(each["models"]) for each in shown) == [
                ("llama",), ("llama",), ("qwen", "chatty"), ("qwen", "chatty"),
            ]  # fmt: skip

    uvloop.run(main())


def test_model_that_stays_without_instances_is_unknown_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with fake_deployment(2, 2) as s:
            name_the_models(s)
            for fake in (s.prefills[1], s.decodes[1]):
                s.app.process.pools.drain(fake.url, then_remove=True)
            assert (await post(s, BODY | {"model": "llama"})).status_code == 503
            now = s.app.client.loop.time()
            hour_later = Mock(time=lambda: now + 3601.0)
            monkeypatch.setattr(s.app.process.pools, "_context", Mock(loop=hour_later))
            s.app.process.pools.finish_drains()
            assert (await post(s, BODY | {"model": "llama"})).status_code == 404
            assert (await post(s, BODY | {"model": "qwen"})).status_code == 200

    uvloop.run(main())


def test_instance_cannot_change_its_model_in_place() -> None:
    async def main() -> None:
        async with fake_deployment(2, 2, admin_keys=frozenset({"admin"})) as s:
            name_the_models(s)
            change = {"operation": "add", "url": s.decodes[0].url, "role": "decode"}
            async with httpx.AsyncClient(base_url=s.url) as client:
                answer = await client.post(
                    "/instances",
                    content=json.dumps(change | {"models": ["llama"]}),
                    headers={"authorization": "Bearer admin"},
                )
            assert answer.status_code == 409
            assert "remove it first" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_pool_file_names_models() -> None:
    text = """
    models:
      Qwen/Qwen3-8B:
        aliases: [chatty]
        prefill: [http://p1:1]
        decode: [{url: http://d1:1, emits_first_token: true}]
      llama: {both: [http://b:1]}
    decode: [http://d2:1]
    """
    specs = {each.name: each for each in parse_pool_file(text.encode(), "pools.yaml")}
    assert specs["http://p1:1"].models == ("Qwen/Qwen3-8B", "chatty")
    assert specs["http://d1:1"].models == ("Qwen/Qwen3-8B", "chatty")
    assert specs["http://d1:1"].emits_first_token
    assert specs["http://b:1"].model == "llama"
    assert specs["http://d2:1"].model == ""


def parsed(*arguments: str) -> ProxyConfig:
    return config_from(build_parser().parse_args(arguments))


def test_flags_name_models(tmp_path: Path) -> None:
    config = parsed(
        "--policy", "cost", "--prefill", "Qwen/Qwen3-8B,chatty=http://p:1",
        "--decode", "Qwen/Qwen3-8B=http://d:1", "--backend-url", "http://b:1",
        "--costs", "llama-3-8b:H100:2", "--costs", "Qwen/Qwen3-8B=llama-3-8b:A100:1",
        "--tokenizer", f"Qwen/Qwen3-8B={tmp_path}",
    )  # fmt: skip
    assert [each.models for each in config.instances] == [
        ("Qwen/Qwen3-8B", "chatty"), ("Qwen/Qwen3-8B",), (),
    ]  # fmt: skip
    assert config.tokenizers == {"Qwen/Qwen3-8B": str(tmp_path)}
    assert config.conductor is not None
    assert config.conductor.of_model("").costs == "llama-3-8b:H100:2"
    assert config.conductor.of_model("Qwen/Qwen3-8B").costs == "llama-3-8b:A100:1"
    with pytest.raises(ConfigError, match="MODEL=URL"):
        parsed("--decode", ",=http://d:1")
    with pytest.raises(ConfigError, match="given twice for x"):
        parsed("--policy", "cost", "--tokenizer", "x=a", "--tokenizer", "x=b")
