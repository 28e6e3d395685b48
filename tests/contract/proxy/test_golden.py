"""The proxy's side of the JSON contract, defined by the golden files in this folder.

The engine's tests read the same files: each side accepts what the other one sends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from mooncake_proxy.api import openai_bodies
from mooncake_proxy.api.openai_bodies import OpenAIEndpoint
from mooncake_proxy.api.proxied_request import RequestContext, prefill_body, pull_decode_body
from mooncake_proxy.flows.pull_flow import parse_prefill_answer
from mooncake_proxy.flows.push_flow import reserving_decode_body
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instances import Instance, InstanceSpec, Role

HERE = Path(__file__).parent


def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text("utf-8"))
    return content


def context_of(body: dict[str, Any]) -> RequestContext:
    parsed, fields = openai_bodies.parse_request(json.dumps(body).encode())
    endpoint = OpenAIEndpoint.CHAT if "messages" in body else OpenAIEndpoint.COMPLETION
    return RequestContext(None, endpoint, parsed, fields, "r", 0.0, 1.0, 1)  # type: ignore[arg-type]  # no socket


def events_of(stream: bytes) -> list[Any]:
    blocks = [block[6:] for block in stream.decode().split("\n\n") if block]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


@pytest.fixture
def client() -> Iterator[ClientContext]:
    """A client of instances to which nothing is sent: the loop never runs."""
    loop = asyncio.new_event_loop()
    yield ClientContext(loop=loop)
    loop.close()


@pytest.mark.parametrize("name", ["pull_completion", "pull_chat"])
def test_pull(name: str) -> None:
    case = golden(name)
    context = context_of(case["client"])
    assert json.loads(prefill_body(context)) == case["to_prefill"]
    answer = openai_bodies.answer_decoder.decode(json.dumps(case["prefill_answer"]).encode())
    events = openai_bodies.first_token_events(context.endpoint, answer, context.parsed)
    assert events_of(events) == case["first_events"]
    sent = pull_decode_body(context, answer.kv_transfer_params, delivered=True)
    assert json.loads(sent) == case["to_decode"]
    # D puts the `created` of the parameters into its own chunks: one answer, one time.
    created = json.loads(sent)["kv_transfer_params"]["created"]
    assert {event["created"] for event in events_of(events)} == {created}


@pytest.mark.parametrize("name", ["pull_vllm_ascend", "pull_vllm_nixl"])
def test_pull_with_other_engines(name: str, client: ClientContext) -> None:
    """Other engines' parameters reach their D unchanged; the proxy sends the first token itself."""
    case = golden(name)
    context = context_of(case["client"])
    assert json.loads(prefill_body(context)) == case["to_prefill"]
    instance = Instance(InstanceSpec(Origin.parse("http://p:1"), Role.PREFILL), client)
    prefill = parse_prefill_answer(instance, json.dumps(case["prefill_answer"]).encode())
    assert not prefill.is_final
    assert prefill.params is not None
    sent = pull_decode_body(context, prefill.params, delivered=False)
    assert json.loads(sent) == case["to_decode"]


def test_finished_on_prefill() -> None:
    case = golden("pull_finished_on_prefill")
    context = context_of(case["client"])
    answer = openai_bodies.answer_decoder.decode(json.dumps(case["prefill_answer"]).encode())
    events = openai_bodies.final_answer_events(
        context.endpoint, answer, context.parsed, shows_ids=False
    )
    assert events_of(events) == case["events"]


def test_push() -> None:
    case = golden("push_completion")
    context = context_of(case["client"])
    metaserver = case["to_decode"]["kv_transfer_params"]["metaserver"]
    assert (
        json.loads(reserving_decode_body(context, metaserver, is_pulled=False)) == case["to_decode"]
    )
    posted = Raw(json.dumps(case["decode_posts"]).encode())
    assert json.loads(prefill_body(context, posted)) == case["to_prefill"]
