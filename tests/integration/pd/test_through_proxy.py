"""A whole deployment through the openai client, with clients that disconnect and instances that
die."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from support.pd_processes import Served, serving
from support.programs import TINY_LLAMA, running

PAGE = (TINY_LLAMA / "page.txt").read_text()
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}
LEASE_S = 2.0
EXPIRED = "mooncake:kv_transfer_leases_expired_total"


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

    def wait_until_idle(self, *instances: Served, within_s: float = 5.0) -> None:
        """Wait until every block of these instances is free, within that time."""
        for served in instances or (self.prefill, self.decode):
            wait_until(lambda url=served.url: not usage(url), within_s)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with ExitStack() as stack:
        yield deploy(stack)


@pytest.fixture
def early() -> Iterator[Deployment]:
    """A deployment that pulls prompts of 100 tokens and more early, in chunks of 64."""
    with ExitStack() as stack:
        yield deploy(stack, "--early-pull-tokens", "100", chunk=64)


def deploy(stack: ExitStack, *proxy_options: str, chunk: int = 2048) -> Deployment:
    lease = ("--lease-seconds", str(LEASE_S), "--num-kv-blocks", "512")
    chunks = ("--max-num-batched-tokens", str(chunk))
    prefill = stack.enter_context(serving(TINY_LLAMA, "prefill", *lease, *chunks))
    decode = stack.enter_context(serving(TINY_LLAMA, "decode", *lease))
    argv = ["--port", "0", "--prefill", prefill.url, "--decode", decode.url, *proxy_options]
    proxy = stack.enter_context(running("mooncake_proxy", *argv))
    return Deployment(proxy.wait_for("listens on").split()[-1], prefill, decode)


def figure(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return float(line.rsplit(" ", 1)[1])


def usage(url: str) -> float:
    return figure(url, "vllm:kv_cache_usage_perc")


def wait_until(is_true: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(0.02)


def test_streamed_and_non_streamed_answer(deployment: Deployment) -> None:
    ask = deployment.client.completions.create
    case = {"model": "tiny-llama", "prompt": PAGE[:300], "max_tokens": 30, "temperature": 0}
    whole = ask(**case).choices[0].text
    assert whole == PAGE[300:330]
    assert "".join(chunk.choices[0].text for chunk in ask(**case, stream=True)) == whole
    deployment.wait_until_idle()


def test_client_disconnect_from_stream_frees_both_sides(deployment: Deployment) -> None:
    stream = deployment.client.completions.create(
        model="tiny-llama", prompt=PAGE[:400], stream=True, **ENDLESS
    )
    for _, _ in zip(range(3), stream, strict=False):
        pass
    assert usage(deployment.decode.url) > 0
    stream.close()
    deployment.wait_until_idle()


def test_client_disconnect_from_non_streamed_request_frees_both_sides(
    deployment: Deployment,
) -> None:
    client = deployment.client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="tiny-llama", prompt=PAGE[:400], **ENDLESS)
    deployment.wait_until_idle()


def test_client_disconnect_from_several_choices_ends_all_leases(deployment: Deployment) -> None:
    """Each choice has its own blocks on both sides; none is left to expire."""
    expired = figure(deployment.prefill.url, EXPIRED)
    stream = deployment.client.completions.create(
        model="tiny-llama", prompt=PAGE[:400], n=3, stream=True, **ENDLESS
    )
    for _, _ in zip(range(9), stream, strict=False):
        pass
    stream.close()
    deployment.wait_until_idle()
    client = deployment.client.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model="tiny-llama", prompt=PAGE[:400], n=3, **ENDLESS)
    deployment.wait_until_idle()
    assert figure(deployment.prefill.url, EXPIRED) == expired


ORDER = {"prompt": PAGE[:200], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def test_prefill_as_by_vllm(deployment: Deployment) -> None:
    """P's token has no log probabilities, and one lease serves several choices."""

    def post(url: str, **more: Any) -> dict[str, Any]:
        case = {"prompt": PAGE[40:343], "max_tokens": 8, "temperature": 0, "seed": 1}
        answer = httpx.post(f"{url}/v1/completions", json=case | more, timeout=30.0)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    asked = {"n": 3, "logprobs": 2}
    received = figure(deployment.decode.url, "mooncake:kv_transfer_bytes_received_total")
    order = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = post(deployment.prefill.url, **order)["kv_transfer_params"]
    assert "last_token_logprobs" not in params
    found = post(deployment.decode.url, **asked, kv_transfer_params=params)
    whole = post(deployment.prefill.url, **asked)
    for choice, expected in zip(found["choices"], whole["choices"], strict=True):
        assert choice["text"] == expected["text"]
        logprobs, wanted = choice["logprobs"], expected["logprobs"]
        assert logprobs["tokens"] == wanted["tokens"]
        assert logprobs["text_offset"] == wanted["text_offset"]
        assert logprobs["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-3)
        assert len(logprobs["top_logprobs"]) == 8
    now = figure(deployment.decode.url, "mooncake:kv_transfer_bytes_received_total")
    assert now > received, "it was pulled"
    deployment.wait_until_idle()


def test_abort_over_http_frees_held_prompt(deployment: Deployment) -> None:
    url = deployment.prefill.url
    answer = httpx.post(f"{url}/v1/completions", json=ORDER).json()
    assert usage(url) > 0
    wanted = {"request_id": answer["kv_transfer_params"]["remote_request_id"]}
    for _ in range(2):
        assert httpx.post(f"{url}/abort", json=wanted).status_code == 200
    deployment.wait_until_idle(deployment.prefill, within_s=LEASE_S / 2)


@pytest.mark.parametrize(
    "change",
    [{"remote_port": 2**80}, {"remote_block_ids": "all"}, {"last_token_id": -1}],
    ids=str,
)
def test_malformed_params_return_client_error(
    deployment: Deployment, change: dict[str, object]
) -> None:
    answer = httpx.post(f"{deployment.prefill.url}/v1/completions", json=ORDER).json()
    params = {**answer["kv_transfer_params"], **change}
    body = {"prompt": PAGE[:200], "max_tokens": 5, "kv_transfer_params": params}
    refused = httpx.post(f"{deployment.decode.url}/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_transfer_params"
    deployment.wait_until_idle()


def test_instance_deaths(deployment: Deployment) -> None:
    """Runs last: the decode instance dies in mid-stream, then its peer."""
    stream = deployment.client.completions.create(
        model="tiny-llama", prompt=PAGE[:400], stream=True, **ENDLESS
    )
    next(iter(stream))
    deployment.decode.kill()
    started = time.monotonic()
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        for _ in stream:
            pass
    assert time.monotonic() - started < 5.0
    deployment.wait_until_idle(deployment.prefill, within_s=LEASE_S + 2.0)
    deployment.prefill.kill()
    with pytest.raises(openai.InternalServerError):
        deployment.client.completions.create(model="tiny-llama", prompt=PAGE[:100])


def wait_until_pulled_early(deployment: Deployment, decode: Served) -> None:
    """Wait until the proxy uses early pulls, which it does once it knows both instances' topology.

    The prompts keep the page's first part out of the prefix caches: D can only read early what P
    has to compute.
    """
    received = "mooncake:kv_transfer_bytes_received_early_total"
    starts = iter(range(800, 1400, 20))

    def is_pulled_early() -> bool:
        start = next(starts)
        case = {"prompt": PAGE[start : start + 400], "max_tokens": 10, "temperature": 0}
        answer = deployment.client.completions.create(model="tiny-llama", **case)
        assert answer.choices[0].text == PAGE[start + 400 : start + 410]
        return figure(decode.url, received) > 0

    wait_until(is_pulled_early, 20.0)


def test_long_prompts_are_pulled_early(early: Deployment) -> None:
    """Streamed and not, several choices by the other flow, then P dies in the middle of a
    prompt."""
    ask = early.client.completions.create
    case = {"model": "tiny-llama", "prompt": PAGE[:600], "max_tokens": 30, "temperature": 0}
    received = "mooncake:kv_transfer_bytes_received_early_total"
    wait_until_pulled_early(early, early.decode)
    before = figure(early.decode.url, received)
    whole = ask(**case).choices[0].text
    assert whole == PAGE[600:630]
    # published after the answer
    wait_until(lambda: figure(early.decode.url, received) > before, 5.0)
    again = {**case, "prompt": PAGE[50:750]}
    assert "".join(c.choices[0].text for c in ask(**again, stream=True)) == PAGE[750:780]
    before = figure(early.decode.url, received)
    assert [c.text for c in ask(**{**case, "n": 2}).choices] == [whole] * 2
    assert figure(early.decode.url, received) == before, "each choice is pulled separately"
    early.wait_until_idle()
    early.prefill.kill()
    assert ask(**{**case, "prompt": PAGE[100:700]}).choices[0].text == PAGE[700:730]
    early.wait_until_idle(early.decode)


def test_client_disconnect_from_early_pull_frees_both_sides(early: Deployment) -> None:
    stream = early.client.completions.create(
        model="tiny-llama", prompt=PAGE[:400], stream=True, **ENDLESS
    )
    for _, _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    early.wait_until_idle()


def test_workers_pull_early_through_their_own_ports(early: Deployment) -> None:
    """Workers open these ports when they have seen that both instances support early pulls."""
    argv = ["--port", "0", "--prefill", early.prefill.url, "--decode", early.decode.url]
    with running("mooncake_proxy", *argv, "--workers", "2", "--early-pull-tokens", "100") as proxy:
        workers = Deployment(proxy.wait_for("listens on").split()[-1], early.prefill, early.decode)
        wait_until_pulled_early(workers, early.decode)
