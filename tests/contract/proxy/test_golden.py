"""The proxy's side of the JSON contract, pinned by the golden files next to this one.

The engine's tests read the same files: what one side sends, the other side takes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from mooncake_proxy import openai
from mooncake_proxy.call import Call, decode_body, prefill_body
from mooncake_proxy.flows.pull import understand
from mooncake_proxy.flows.push import decode_body as push_decode_body
from mooncake_proxy.http1.connection import ClientContext
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.instances import Instance, InstanceSpec, Role
from mooncake_proxy.openai import Endpoint

HERE = Path(__file__).parent


def golden(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text("utf-8"))
    return content


def call_of(body: dict[str, Any]) -> Call:
    ask, fields = openai.parse_request(json.dumps(body).encode())
    endpoint = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETION
    return Call(None, endpoint, ask, fields, "r", 0.0, 1.0, 1)  # type: ignore[arg-type]  # no socket


def events_of(stream: bytes) -> list[Any]:
    blocks = [block[6:] for block in stream.decode().split("\n\n") if block]
    return [block if block == "[DONE]" else json.loads(block) for block in blocks]


@pytest.fixture
def context() -> Iterator[ClientContext]:
    """For instances that nothing is sent to: the loop never runs."""
    loop = asyncio.new_event_loop()
    yield ClientContext(loop=loop)
    loop.close()


@pytest.mark.parametrize("name", ["pull_completion", "pull_chat"])
def test_pull(name: str) -> None:
    case = golden(name)
    call = call_of(case["client"])
    assert json.loads(prefill_body(call)) == case["to_prefill"]
    answer = openai.answer_decoder.decode(json.dumps(case["prefill_answer"]).encode())
    events = openai.first_token_events(call.endpoint, answer, call.ask)
    assert events_of(events) == case["first_events"]
    sent = decode_body(call, answer.kv_transfer_params, delivered=True)
    assert json.loads(sent) == case["to_decode"]
    # D writes `created` of its own chunks from the parameters: one answer, one time.
    created = json.loads(sent)["kv_transfer_params"]["created"]
    assert {event["created"] for event in events_of(events)} == {created}


@pytest.mark.parametrize("name", ["pull_vllm_ascend", "pull_vllm_nixl"])
def test_pull_in_front_of_others(name: str, context: ClientContext) -> None:
    """Their parameters reach their D untouched; it sends the first token itself."""
    case = golden(name)
    call = call_of(case["client"])
    assert json.loads(prefill_body(call)) == case["to_prefill"]
    instance = Instance(InstanceSpec(Origin.parse("http://p:1"), Role.PREFILL), context)
    prefilled = understand(instance, json.dumps(case["prefill_answer"]).encode())
    assert not prefilled.is_final
    assert prefilled.params is not None
    sent = decode_body(call, prefilled.params, delivered=False)
    assert json.loads(sent) == case["to_decode"]


def test_finished_on_prefill() -> None:
    case = golden("pull_finished_on_prefill")
    call = call_of(case["client"])
    answer = openai.answer_decoder.decode(json.dumps(case["prefill_answer"]).encode())
    events = openai.final_answer_events(call.endpoint, answer, call.ask)
    assert events_of(events) == case["events"]


def test_push() -> None:
    case = golden("push_completion")
    call = call_of(case["client"])
    metaserver = case["to_decode"]["kv_transfer_params"]["metaserver"]
    assert json.loads(push_decode_body(call, metaserver)) == case["to_decode"]
    posted = Raw(json.dumps(case["decode_posts"]).encode())
    assert json.loads(prefill_body(call, posted)) == case["to_prefill"]
