"""A pair behind llm-d's routing sidecar.

The endpoint picker names the prefill instance in a header. Every API gives a single instance's
answers, and the KV comes from the peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from support.asgi_server import serving_app
from support.pd_processes import serving
from support.programs import TINY_LLAMA
from support.routing_sidecar import PREFILLER, RoutingSidecar

PAGE = (TINY_LLAMA / "page.txt").read_text()
RECEIVED = "mooncake:kv_transfer_bytes_received_total"
GREEDY: dict[str, Any] = {"model": "tiny-llama", "temperature": 0}
ASKED = [{"role": "user", "content": PAGE[:300]}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PAGE[:300], "max_tokens": 40},
    "/v1/chat/completions": {"messages": ASKED, "max_completion_tokens": 40},
    "/v1/messages": {"messages": ASKED, "max_tokens": 40},
    "/v1/responses": {"input": ASKED, "max_output_tokens": 40},
}
VARYING = {"id", "created", "created_at", "completed_at", "system_fingerprint", "usage", "metrics"}


@dataclass(frozen=True)
class Pods:
    """The instances that a picker chooses from, and the sidecar in the decode pod."""

    prefill: str
    decode: str
    sidecar: str

    def ask(self, path: str, body: dict[str, Any], prefiller: str = "") -> httpx.Response:
        """Send a request through the sidecar, as a gateway whose picker chose ``prefiller``."""
        headers = {"x-request-id": "of-the-gateway"}
        if prefiller:
            headers[PREFILLER] = prefiller.removeprefix("http://")
        url = f"{self.sidecar}{path}"
        return httpx.post(url, json=GREEDY | body, headers=headers, timeout=60.0)

    def received(self) -> float:
        """Bytes of KV that D has pulled so far."""
        lines = httpx.get(f"{self.sidecar}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(RECEIVED))


@pytest.fixture(scope="module")
def pods() -> Iterator[Pods]:
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(serving(TINY_LLAMA, role, "--no-prefix-caching"))
            for role in ("prefill", "decode")
        )
        sidecar = stack.enter_context(serving_app(RoutingSidecar(decode.url).app()))
        yield Pods(prefill.url, decode.url, sidecar)


@pytest.mark.parametrize("path", REQUESTS)
def test_answer_equals_single_instance_and_kv_comes_from_peer(pods: Pods, path: str) -> None:
    alone = pods.ask(path, REQUESTS[path])
    before = pods.received()
    found = pods.ask(path, REQUESTS[path], pods.prefill)
    assert alone.status_code == found.status_code == 200, found.text
    assert same(found.json()) == same(alone.json())
    assert pods.received() > before


@pytest.mark.parametrize("path", REQUESTS)
def test_streams_are_whole(pods: Pods, path: str) -> None:
    body = REQUESTS[path] | {"stream": True}
    before = pods.received()
    alone, found = pods.ask(path, body), pods.ask(path, body, pods.prefill)
    assert found.status_code == 200, found.text
    assert len(found.text.split("\n\n")) == len(alone.text.split("\n\n"))
    assert pods.received() > before


def test_answer_ending_with_first_token(pods: Pods) -> None:
    body = {"prompt": PAGE[:300], "max_tokens": 1}
    alone = pods.ask("/v1/completions", body).json()
    assert same(pods.ask("/v1/completions", body, pods.prefill).json()) == same(alone)
    stopped = body | {"max_tokens": 40, "stop": alone["choices"][0]["text"]}
    expected = pods.ask("/v1/completions", stopped).json()
    assert expected["choices"][0]["finish_reason"] == "stop"
    assert same(pods.ask("/v1/completions", stopped, pods.prefill).json()) == same(expected)


def test_prefill_rejection_reaches_client(pods: Pods) -> None:
    answer = pods.ask("/v1/completions", {"prompt": "a", "suffix": "x"}, pods.prefill)
    assert answer.status_code == 400
    assert "suffix" in answer.json()["error"]["message"]


def same(found: Any) -> Any:
    """The answer without the fields that differ from one request to the next."""
    if isinstance(found, dict):
        return {name: same(value) for name, value in found.items() if name not in VARYING}
    return [same(value) for value in found] if isinstance(found, list) else found
