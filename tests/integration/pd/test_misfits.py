"""A pair that doesn't fit behind a proxy: one request pays for finding out, the others don't."""

from __future__ import annotations

import time

import httpx
import pytest
from support.pd_processes import serving
from support.programs import TINY_LLAMA, running
from support.push import LAYERWISE

CONNECTORS = {"pull": "MooncakeConnector", "push": LAYERWISE}
BODY = {"model": "tiny-llama", "prompt": "A language model answers", "max_tokens": 8}
WITHIN_S = 30.0


@pytest.mark.parametrize("flow", list(CONNECTORS))
def test_the_proxy_leaves_a_pair_alone_that_refused(flow: str) -> None:
    options = ("--kv-connector", CONNECTORS[flow], "--num-kv-blocks", "512")
    with (
        serving(TINY_LLAMA, "prefill", *options) as prefill,
        serving(TINY_LLAMA, "decode", *options, "--dtype", "float32") as decode,
        running(
            "mooncake_proxy",
            *("--port", "0", "--flow", flow, "--health-interval", "0.1"),
            *("--prefill", prefill.url, "--decode", decode.url),
        ) as proxy,
    ):
        url = proxy.wait_for("listens on").split()[-1]
        ask(url)
        assert figure(decode.url, "mooncake:kv_transfer_refused_peers_total") == 1
        assert figure(decode.url, "mooncake:kv_transfer_refused_loads_total") == 1
        deadline = time.monotonic() + WITHIN_S
        while not (alone := figure(url, "mooncake_proxy_local_prefill_total")):
            assert time.monotonic() < deadline, "the proxy has not heard of the refusal"
            ask(url)
        spent = figure(decode.url, "mooncake:kv_transfer_refused_loads_total")
        for _ in range(3):
            ask(url)
        assert figure(url, "mooncake_proxy_local_prefill_total") == alone + 3
        assert figure(decode.url, "mooncake:kv_transfer_refused_loads_total") == spent


def ask(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == BODY["max_tokens"]


def figure(url: str, name: str) -> float:
    """A metric's sum over its labels; 0 where it has none yet."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
