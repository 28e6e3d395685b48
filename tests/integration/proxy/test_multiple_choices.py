"""Requests with `n` > 1 where P makes one lease of the prompt: D starts every choice from it."""

from __future__ import annotations

from typing import Any

import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment, text_of, token_id
from support.proxy_fakes_client import BODY, CHAT, events_of, post

from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.pool.pair_topology import PairTopology

Json = dict[str, Any]
PATHS = {"/v1/completions": BODY, "/v1/chat/completions": CHAT}
SEVERAL: Json = {"n": 3}


def continue_prompts(s: FakeDeployment) -> None:
    """Make every P behave as vLLM with our connector."""
    for fake in s.prefills:
        fake.behaviour.continues_prompt = True
        fake.behaviour.last_token_id = token_id(0)


def texts(answer: Any, *, is_streamed: bool) -> list[str]:
    """The text of each of the three choices."""
    contents = [""] * SEVERAL["n"]
    parts = events_of(answer.text)[:-1] if is_streamed else [answer.json()]
    for choice in [choice for part in parts for choice in part["choices"]]:
        message = choice.get("delta") or choice.get("message") or {}
        contents[choice["index"]] += choice.get("text") or message.get("content") or ""
    return contents


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("emits_first_token", [False, True], ids=["our D", "vLLM's D"])
def test_vllm_prefill_computes_one_choice(
    path: str, *, emits_first_token: bool, is_streamed: bool
) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=emits_first_token) as s:
            continue_prompts(s)
            ends = {"stop": ["t9"], "stop_token_ids": [9], "min_tokens": 2}
            body = PATHS[path] | SEVERAL | ends | {"stream": is_streamed, "best_of": 3}
            answer = await post(s, body, path)
            assert texts(answer, is_streamed=is_streamed) == [text_of(5)] * 3
            [asked], [decoded] = s.prefill.generated, s.decode.generated
            assert not {"n", "best_of", *ends} & asked.body.keys()
            assert asked.body["ignore_eos"] is True
            assert asked.body["max_tokens"] == 1
            params = decoded.body.pop("kv_transfer_params")
            assert decoded.body == body
            assert params["remote_request_id"] == "p0:abc"
            assert params["first_token_delivered"] is False
            assert s.prefill.holding == ["p0:abc"], "one lease"
            await s.app.router.close()
            assert s.prefill.released == []
            assert s.count("fallbacks", "several_answers") == 0

    uvloop.run(main())


STRUCTURED: dict[str, Json] = {
    "response_format": {"response_format": {"type": "json_object"}},
    "structured outputs": {"structured_outputs": {"regex": "a+"}},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
}
FORCED: dict[str, Json] = {
    choice: STRUCTURED["tools"] | {"tool_choice": tool_choice}
    for choice, tool_choice in {
        "required": "required",
        "named": {"type": "function", "function": {"name": "f"}},
    }.items()
}


@pytest.mark.parametrize("fields", [*STRUCTURED.values(), *FORCED.values()])
def test_discarded_token_never_ends_a_grammar(fields: Json) -> None:
    """Our P refuses ``ignore_eos`` beside a grammar, as an error of the client."""

    async def main() -> None:
        async with fake_deployment() as s:
            await post(s, CHAT | SEVERAL | fields, "/v1/chat/completions")
            [asked], [decoded] = s.prefill.generated, s.decode.generated
            assert fields.items() <= decoded.body.items()
            has_grammar = "tool_choice" in asked.body
            assert asked.body.get("ignore_eos", False) is not has_grammar
            assert not {"response_format", "structured_outputs"} & asked.body.keys()
            assert asked.body.get("tools") == fields.get("tools"), "they are part of the prompt"

    uvloop.run(main())


@pytest.mark.parametrize("is_streamed", [False, True])
def test_prefill_that_leases_every_choice_gets_full_n(*, is_streamed: bool) -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            s.publish_topologies(splits_choices=True)
            answer = await post(s, BODY | SEVERAL | {"stream": is_streamed})
            assert texts(answer, is_streamed=is_streamed) == [text_of(5)] * 3
            assert s.prefill.generated[0].body["n"] == 3
            params = s.decode.generated[0].body["kv_transfer_params"]
            assert len(params["choices"]) == 3
            assert params["first_token_delivered"] is is_streamed

    uvloop.run(main())


def test_vllm_decode_gets_one_lease_from_our_prefill() -> None:
    """vLLM would fetch one of several leases, and the others would expire."""

    async def main() -> None:
        async with fake_deployment(emits_first_token=True) as s:
            pool = s.app.router.pool
            pool.note_topology(pool.get(s.prefill.url), PairTopology("p", splits_choices=True))
            answer = await post(s, BODY | SEVERAL)
            assert texts(answer, is_streamed=False) == [text_of(5)] * 3
            assert "n" not in s.prefill.generated[0].body
            params = s.decode.generated[0].body["kv_transfer_params"]
            assert params["remote_request_id"] == "p0:abc"
            assert "choices" not in params

    uvloop.run(main())


def test_prefill_stopped_on_first_token_falls_back_to_decode() -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True) as s:
            continue_prompts(s)
            s.prefill.behaviour.stops_at_first = True
            answer = await post(s, BODY | SEVERAL)
            assert texts(answer, is_streamed=False) == [text_of(5)] * 3
            assert "kv_transfer_params" not in s.decode.generated[0].body
            assert s.count("fallbacks", "several_answers") == 1

    uvloop.run(main())


def test_nixl_lease_serves_one_choice() -> None:
    """NIXL's P frees the KV once the first choice has fetched it; the other choices would read
    whatever the blocks contain by then."""

    async def main() -> None:
        async with fake_deployment(emits_first_token=True) as s:
            answer = await post(s, BODY | SEVERAL)
            assert texts(answer, is_streamed=False) == [text_of(5)] * 3
            assert "kv_transfer_params" not in s.decode.generated[0].body
            await s.prefill.wait_for(lambda: s.prefill.released == ["p0:abc"])
            assert s.count("fallbacks", "several_answers") == 1

    uvloop.run(main())


def test_transfer_named_by_proxy_serves_one_choice() -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True) as s:
            origin = Origin.parse(s.prefill.url)
            s.app.router.pool.add(InstanceSpec(origin, Role.PREFILL, bootstrap_port=origin.port))
            s.prefill.behaviour.has_params = False
            answer = await post(s, BODY | SEVERAL)
            assert texts(answer, is_streamed=False) == [text_of(5)] * 3
            assert not s.prefill.generated
            assert s.count("fallbacks", "several_answers") == 1
            assert (await post(s, BODY)).is_success
            assert len(s.prefill.generated) == 1

    uvloop.run(main())


def test_push_prefill_computes_one_choice() -> None:
    async def main() -> None:
        async with fake_deployment(flow="push") as s:
            s.publish_topologies(splits_choices=True)
            await post(s, BODY | SEVERAL | {"best_of": 3, "stop": ["t9"]})
            [asked] = s.prefill.generated
            assert not {"n", "best_of"} & asked.body.keys()
            assert asked.body["stop"] == ["t9"], "P's token is that of the first choice"
            assert "ignore_eos" not in asked.body

    uvloop.run(main())
