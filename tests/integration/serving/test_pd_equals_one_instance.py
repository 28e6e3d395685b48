"""A pair gives the answers of one instance: through the proxy, over HTTP."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.programs import TINY_LLAMA, running, serving

Json = dict[str, Any]
PAGE = (TINY_LLAMA / "page.txt").read_text()
# A cached prefix may hold KV computed by a prefill or by a decode, depending on request order: in
# bfloat16 the rounding differs enough to change a sampled token.
EXACT = ("--dtype", "float32")
QUESTIONS = list(json.loads((TINY_LLAMA / "chat.json").read_text())["answers"])


@dataclass(frozen=True)
class Urls:
    """URLs of a deployment's parts."""

    proxy: str
    prefill: str
    decode: str


@pytest.fixture(scope="module")
def urls() -> Iterator[Urls]:
    argv = ["up", "--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "1024"]
    with running("mooncake_engine.cli", *argv, *EXACT) as program:
        proxy = program.wait_for("curl -N ").split()[2].removesuffix("/v1/chat/completions")
        ready = {
            line.split()[0]: line.split()[-1] for line in program.errors if "│ ready http" in line
        }
        yield Urls(proxy, ready["prefill-0"], ready["decode-0"])


@pytest.fixture
def proxy_url(urls: Urls) -> str:
    return urls.proxy


@pytest.fixture(scope="module")
def alone_url() -> Iterator[str]:
    with serving(*EXACT) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60, limits=httpx.Limits(max_connections=64)) as client:
        yield client


def ask(client: httpx.Client, url: str, body: Json) -> Json:
    """The assembled response: text, tokens and finish reason per choice, and the usage."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = client.post(url + path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        answer = response.json()
        return collect([answer], answer["usage"])
    *payloads, last = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-1]]
    assert last == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    return collect(chunks, chunks[-1]["usage"])


def figures(client: httpx.Client, url: str) -> dict[str, float]:
    """An instance's metrics without histograms and without those by reason."""
    families = text_string_to_metric_families(client.get(f"{url}/metrics").text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def collect(chunks: list[Json], usage: Json) -> Json:
    answers: Json = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        empty = {"text": "", "logprobs": [], "tokens": [], "finish": None}
        seen = answers.setdefault(choice["index"], empty)
        message = choice.get("message") or choice.get("delta") or {}
        seen["text"] += choice.get("text", "") + (message.get("content") or "")
        logprobs = choice["logprobs"] or {}
        values = logprobs.get("token_logprobs", [])
        values += [entry["logprob"] for entry in logprobs.get("content", [])]
        seen["logprobs"] += values
        seen["tokens"] += logprobs.get("tokens", [])
        seen["tokens"] += [entry["token"] for entry in logprobs.get("content", [])]
        seen["finish"] = choice["finish_reason"] or seen["finish"]
    counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
    return {"answers": answers, "usage": counts}


def assert_same(answer: Json, expected: Json) -> None:
    assert answer["usage"] == expected["usage"]
    assert answer["answers"].keys() == expected["answers"].keys()
    for index, one in expected["answers"].items():
        logprobs = pytest.approx(one["logprobs"], abs=1e-3)
        assert answer["answers"][index] == one | {"logprobs": logprobs}


def streamed(body: Json) -> Json:
    return body | {"stream": True, "stream_options": {"include_usage": True}}


CASES: dict[str, Json] = {
    "greedy": {"prompt": PAGE[:300], "max_tokens": 40, "temperature": 0},
    "long prompt": {"prompt": PAGE[:1900], "max_tokens": 40, "temperature": 0},
    "seeded": {"prompt": PAGE[:70], "max_tokens": 30, "temperature": 2.0, "seed": 5},
    "penalties": {"prompt": PAGE[:90], "max_tokens": 20, "temperature": 0, "presence_penalty": 2},
    "allowed tokens": {
        "prompt": PAGE[:90],
        "max_tokens": 20,
        "temperature": 0,
        "allowed_token_ids": list(range(60, 110)),
    },
    "bad words": {
        "prompt": PAGE[:200],
        "max_tokens": 20,
        "temperature": 0,
        "bad_words": [PAGE[200:203], "the", " a"],
    },
    "truncated": {
        "prompt": PAGE[:400],
        "max_tokens": 20,
        "temperature": 0,
        "truncate_prompt_tokens": 150,
    },
    "truncated chat": {
        "messages": [{"role": "user", "content": QUESTIONS[8]}],
        "temperature": 0,
        "max_tokens": 20,
        "truncate_prompt_tokens": 20,
    },
    "several": {"prompt": PAGE[:70], "max_tokens": 9, "temperature": 2.0, "seed": 1, "n": 3},
    "logprobs": {"prompt": PAGE[:200], "max_tokens": 12, "temperature": 0, "logprobs": 3},
    "stop string": {"prompt": PAGE[:200], "max_tokens": 200, "temperature": 0, "stop": ["er", "!"]},
    "first token stops": {"prompt": PAGE[:200], "temperature": 0, "stop": [PAGE[200]]},
    "one token": {"prompt": PAGE[:200], "max_tokens": 1, "temperature": 0},
    "two tokens": {"prompt": PAGE[:200], "max_tokens": 2, "temperature": 0},
    "half a character first": {
        "prompt": PAGE[: PAGE.index("é")],
        "max_tokens": 9,
        "temperature": 0,
    },
    "minimum": {"prompt": PAGE[-60:], "max_tokens": 90, "min_tokens": 80, "temperature": 0},
    "chat": {"messages": [{"role": "user", "content": QUESTIONS[8]}], "temperature": 0},
    "chat logprobs": {
        "messages": [{"role": "user", "content": QUESTIONS[6]}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 12,
        "return_tokens_as_token_ids": True,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_same_answer(client: httpx.Client, proxy_url: str, alone_url: str, name: str) -> None:
    body = CASES[name]
    alone = ask(client, alone_url, body)
    assert_same(ask(client, alone_url, streamed(body)), alone)
    assert_same(ask(client, proxy_url, body), alone)
    assert_same(ask(client, proxy_url, streamed(body)), alone)


def test_every_chunk_has_token_usage(client: httpx.Client, proxy_url: str, alone_url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PAGE[:200], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for url in (alone_url, proxy_url):
        request = body | {"stream": True, "stream_options": options}
        text = client.post(f"{url}/v1/completions", json=request).text
        *payloads, _ = [line.removeprefix("data: ") for line in text.split("\n\n")[:-1]]
        counts = [json.loads(payload)["usage"]["completion_tokens"] for payload in payloads]
        assert (counts[0], counts[-1]) == (1, 12)
        assert counts == sorted(counts)


def test_same_32_concurrent_answers(client: httpx.Client, proxy_url: str, alone_url: str) -> None:
    """Mixed lengths, some of them twice, so that only some requests hit a prefix cache."""
    draw = random.Random(7)
    bodies = []
    for _ in range(32):
        start, length = draw.randrange(3) * 16, draw.randrange(40, 900)
        body = {"prompt": PAGE[start : start + length], "max_tokens": draw.randrange(2, 60)}
        body |= draw.choice([{"temperature": 0}, {"temperature": 1.5, "seed": draw.randrange(9)}])
        bodies.append(streamed(body) if draw.random() < 0.5 else body)
    with ThreadPoolExecutor(32) as pool:
        alone = list(pool.map(lambda body: ask(client, alone_url, body), bodies))
        apart = list(pool.map(lambda body: ask(client, proxy_url, body), bodies))
    for answer, expected in zip(apart, alone, strict=True):
        assert_same(answer, expected)


def test_kv_is_transferred_and_released(client: httpx.Client, urls: Urls) -> None:
    """The tests above would also pass if the decode instance did everything itself."""
    before = figures(client, urls.decode)
    ask(client, urls.proxy, {"prompt": PAGE[100:500], "max_tokens": 5, "n": 2})
    after = figures(client, urls.decode)
    assert (
        after["mooncake:kv_transfer_loads_total"] == before["mooncake:kv_transfer_loads_total"] + 2
    )
    assert after["mooncake:kv_transfer_load_failures_total"] == 0
    deadline = time.monotonic() + 5
    while figures(client, urls.prefill)["mooncake:kv_transfer_leases_held"] > 0:
        assert time.monotonic() < deadline, "the prefill instance still holds KV"
        time.sleep(0.02)


def test_rejections_reach_client(client: httpx.Client, proxy_url: str) -> None:
    refused = client.post(f"{proxy_url}/v1/completions", json={"prompt": "x", "temprature": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "temprature"
    too_long = client.post(f"{proxy_url}/v1/completions", json={"prompt": PAGE})
    assert too_long.status_code == 400
    assert "2048" in too_long.json()["error"]["message"]
