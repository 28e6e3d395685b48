"""Rate limits, models and classes per API key, as clients see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import openai
import pytest
import uvloop
from support.proxy_conductor import conductor_of, settings
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY

from mooncake_proxy.api.api_keys import ApiKey
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.config import RequestClass
from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.errors import ConfigError
from mooncake_proxy.proxy_options import build_parser
from mooncake_proxy.routing.prefix_index import load_tokenizer
from mooncake_proxy.routing.prompt_tokens import PromptTokens

MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny-llama"


def keys(*given: ApiKey) -> dict[str, object]:
    return {"api_keys": frozenset(each.key for each in given), "tenants": given}


async def ask(s: FakeDeployment, key: str, **fields: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    headers |= {"x-request-class": str(fields.pop("as_class"))} if "as_class" in fields else {}
    async with httpx.AsyncClient(base_url=s.url, timeout=10) as client:
        return await client.post("/v1/completions", json=BODY | fields, headers=headers)


def test_exhausted_request_limit_returns_openai_error() -> None:
    team = ApiKey("k", "team", requests_per_minute=2)

    async def main() -> None:
        async with fake_deployment(**keys(team, ApiKey("free", "free"))) as s:
            first, second, third = [await ask(s, "k") for _ in range(3)]
            assert [first.status_code, second.status_code] == [200, 200]
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            assert "x-ratelimit-limit-tokens" not in first.headers
            assert third.status_code == 429
            error = third.json()["error"]
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "requests")
            assert "team" in error["message"]
            assert "k" not in error["message"].split()
            assert 1 <= int(third.headers["retry-after"]) <= 30
            assert int(third.headers["retry-after-ms"]) <= 30_000
            assert third.headers["x-ratelimit-remaining-requests"] == "0"
            assert s.count("rate_limited", "team", "requests") == 1
            other = await ask(s, "free")
            assert other.status_code == 200
            assert "x-ratelimit-limit-requests" not in other.headers

    uvloop.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_requested_tokens_are_charged_and_settled_by_usage(
    stream: bool,
) -> None:
    team = ApiKey("k", "team", tokens_per_minute=1000)

    async def main() -> None:
        async with fake_deployment(**keys(team)) as s:
            prompt = list(range(50))
            s.prefill.behaviour.stops_at_first = True
            answer = await ask(s, "k", prompt=prompt, max_tokens=900, stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-tokens"] == "50"
            again = await ask(s, "k", prompt=prompt, max_tokens=800, stream=stream)
            assert again.status_code == 200, "the first one used a few tokens only"
            s.prefill.behaviour.stops_at_first = False
            whole = await ask(s, "k", prompt=prompt, max_tokens=700, stream=stream)
            assert whole.status_code == 200
            too_many = await ask(s, "k", prompt=prompt, max_tokens=200)
            assert too_many.status_code == 429
            assert too_many.json()["error"]["type"] == "tokens"

    uvloop.run(main())


def test_rate_limited_prompt_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    team = ApiKey("k", "team", requests_per_minute=2, tokens_per_minute=1000)
    prompt, encode, tokenized = "word " * 80, PromptTokens.encode, []

    def encode_noted(tokens: PromptTokens, context: RequestContext, text: str) -> Sequence[int]:
        tokenized.append(context.request_id)
        return encode(tokens, context, text)

    async def main() -> None:
        reads_prompts = {"prefill_policy": "prefix", "tokenizers": {"": str(MODEL)}}
        async with fake_deployment(**keys(team), **reads_prompts) as s:
            monkeypatch.setattr(PromptTokens, "encode", encode_noted)
            s.prefill.behaviour.stops_at_first = True
            first = await ask(s, "k", prompt=prompt, max_tokens=1)
            assert first.status_code == 200
            counted = len(load_tokenizer(str(MODEL)).encode(prompt))
            left = int(first.headers["x-ratelimit-remaining-tokens"])
            assert abs(999 - counted - left) <= 2, "the counted tokens are charged"
            assert abs(counted - len(prompt) // 4) > 10, "the estimate is another number"
            too_many = await ask(s, "k", prompt=prompt, max_tokens=1000)
            assert too_many.json()["error"]["type"] == "tokens"
            assert (await ask(s, "k", prompt=prompt)).status_code == 200
            assert (await ask(s, "k", prompt=prompt)).status_code == 429
            assert len(tokenized) == 2

    uvloop.run(main())


def test_openai_client_retries_after_rate_limit() -> None:
    team = ApiKey("k", "team", requests_per_minute=60)

    async def main() -> None:
        async with fake_deployment(**keys(team)) as s:
            client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="k", max_retries=5)
            loop = asyncio.get_running_loop()
            for _ in range(60):
                s.app.process.tenants.limits.take("team", 1, loop.time())
            began = loop.time()
            answer = await client.completions.create(model="m", prompt="x", max_tokens=4)
            assert answer.choices[0].text
            assert 0.3 <= loop.time() - began <= 5.0
            await client.close()

    uvloop.run(main())


def test_key_sees_only_its_models() -> None:
    async def main() -> None:
        async with fake_deployment(**keys(ApiKey("k", "team", models=frozenset({"qwen"})))) as s:
            assert (await ask(s, "k", model="qwen")).status_code == 200
            refused = await ask(s, "k", model="llama")
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "model_not_found"

    uvloop.run(main())


def test_key_has_its_class() -> None:
    classes = (RequestClass("strict", "500", "50"), RequestClass("spare", "inf", "inf"))
    given = ApiKey("k", "team", classes=("strict",)), ApiKey("l", "other", ("spare", "strict"))
    conductor = settings("cost", admission="predictive", classes=classes)

    async def main() -> None:
        async with fake_deployment(**keys(*given), **conductor) as s:
            routed = conductor_of(s)._records
            assert (await ask(s, "k")).status_code == 200
            assert (await ask(s, "l")).status_code == 200
            assert (await ask(s, "l", as_class="strict")).status_code == 200
            assert [each.request.request_class for each in routed.values()] == [
                "strict", "spare", "strict",
            ]  # fmt: skip
            refused = await ask(s, "k", as_class="spare")
            assert refused.status_code == 400
            assert "this key has strict" in refused.json()["error"]["message"]

    uvloop.run(main())


def test_keys_and_classes_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    team = {"key": "k", "name": "team", "classes": ["strict"], "requests_per_minute": 5}
    content = {"keys": [team], "classes": {"strict": {"ttft": 500, "best_effort": True}}}
    path.write_text(json.dumps(content))
    flags = ["--backend-url", "http://b:1", "--api-key-file", str(path)]
    config = config_from(build_parser().parse_args([*flags, "--policy", "cost"]))
    assert config.api_keys == {"k"}
    assert config.tenants[0].requests_per_minute == 5
    assert config.conductor is not None
    assert config.conductor.classes == (RequestClass("strict", "500", "inf", True),)
    with pytest.raises(ConfigError, match="no class strict"):
        config_from(build_parser().parse_args(flags))
