"""A whole deployment that pushes, as clients see it: proxy, metaserver and real instances."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from support.pd_processes import Served, serving
from support.programs import TINY_LLAMA, running
from support.push import LAYERWISE

PAGE = (TINY_LLAMA / "page.txt").read_text()
CASE: dict[str, Any] = {"model": "tiny-llama", "temperature": 0}
OPTIONS = (
    "--kv-connector",
    LAYERWISE,
    "--lease-seconds",
    "2",
    "--num-kv-blocks",
    "512",
    "--max-num-batched-tokens",
    "128",
)


@dataclass(frozen=True)
class Deployment:
    """A proxy in front of one instance of each role."""

    url: str
    prefill: Served
    decode: Served

    @property
    def client(self) -> openai.OpenAI:
        """The official client, without its own retries."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30.0)

    def wait_until_idle(self, within_s: float = 5.0) -> None:
        """Wait until every block is free, within that time."""
        deadline = time.monotonic() + within_s
        while any(figure(s.url, "vllm:kv_cache_usage_perc") for s in (self.prefill, self.decode)):
            assert time.monotonic() < deadline, f"blocks in use after {within_s:g} s"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with ExitStack() as stack:
        prefill = stack.enter_context(serving(TINY_LLAMA, "prefill", *OPTIONS))
        decode = stack.enter_context(serving(TINY_LLAMA, "decode", *OPTIONS))
        argv = ["--port", "0", "--flow", "push"]
        argv += ["--prefill", prefill.url, "--decode", decode.url]
        proxy = stack.enter_context(running("mooncake_proxy", *argv))
        yield Deployment(proxy.wait_for("listens on").split()[-1], prefill, decode)


def figure(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_completion_streamed_and_not(deployment: Deployment) -> None:
    ask = deployment.client.completions.create
    prompts_before = figure(deployment.prefill.url, "vllm:prompt_tokens_total")
    whole = ask(prompt=PAGE[:300], max_tokens=30, **CASE)
    assert whole.choices[0].text == PAGE[300:330]
    assert whole.usage is not None
    num_bytes = len(PAGE[:300].encode())
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (num_bytes, 30)
    stream = ask(prompt=PAGE[:300], max_tokens=30, stream=True, **CASE)
    assert "".join(chunk.choices[0].text for chunk in stream) == PAGE[300:330]
    assert (
        figure(deployment.prefill.url, "vllm:prompt_tokens_total") == prompts_before + 2 * num_bytes
    )
    deployment.wait_until_idle()


def test_chat(deployment: Deployment) -> None:
    answer = deployment.client.chat.completions.create(
        messages=[{"role": "user", "content": "What is prefill?"}], max_tokens=100, **CASE
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    deployment.wait_until_idle()


@pytest.mark.parametrize(
    "change", [{"max_tokens": 1}, {"n": 2, "seed": 1}, {"logprobs": 2}], ids=str
)
def test_other_response_formats(deployment: Deployment, change: dict[str, Any]) -> None:
    case = {"prompt": PAGE[:200], "max_tokens": 8, **CASE, **change}
    answer = deployment.client.completions.create(**case)
    for choice in answer.choices:
        assert choice.text == PAGE[200 : 200 + case["max_tokens"]]
        if choice.logprobs is not None:
            assert len(choice.logprobs.tokens or ()) == case["max_tokens"]
    deployment.wait_until_idle()


def test_several_choices_start_from_one_reservation(deployment: Deployment) -> None:
    """P computes the prompt and pushes it to D once, for all choices."""
    before = figure(deployment.decode.url, "mooncake:kv_transfer_loads_total")
    case = {"prompt": PAGE[20:300], "max_tokens": 8, "n": 3, **CASE}
    answer = deployment.client.completions.create(**case)
    assert [choice.text for choice in answer.choices] == [PAGE[300:308]] * 3
    assert figure(deployment.decode.url, "mooncake:kv_transfer_loads_total") == before + 1
    deployment.wait_until_idle()


def test_client_disconnect_frees_both_sides(deployment: Deployment) -> None:
    client = deployment.client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            prompt=PAGE[:400], max_tokens=1500, extra_body={"ignore_eos": True}, **CASE
        )
    deployment.wait_until_idle()


def test_stream_continues_without_prefill_instance(deployment: Deployment) -> None:
    """Runs last, since it kills P. The decode instance serves the next request alone."""
    stream = deployment.client.completions.create(
        prompt=PAGE[:300], max_tokens=200, stream=True, **CASE
    )
    text = next(stream).choices[0].text
    deployment.prefill.kill()
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == PAGE[300:500]
    answer = deployment.client.completions.create(prompt=PAGE[:300], max_tokens=30, **CASE)
    assert answer.choices[0].text == PAGE[300:330]
