"""A stream whose D is lost or shuts down is migrated to another one: the client sees one answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import uvloop
from support.proxy_conductor import check_nothing_is_reserved, settings
from support.proxy_fakes import (
    PROMPT_IDS,
    Behaviour,
    FakeDeployment,
    ReceivedRequest,
    fake_deployment,
    text_of,
    token_id,
)
from support.proxy_fakes_client import BODY, CHAT, NO_TLS, events_of, post, streamed_text

from mooncake_proxy.api.api_keys import ApiKey
from mooncake_proxy.http1.upstream_connection import ClientLimits
from mooncake_proxy.pool.instance_reports import Compatibility

USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
PATHS = ("/v1/completions", "/v1/chat/completions")
MIGRATES: dict[str, Any] = {"num_decodes": 2, "migrates_streams": True}


def let_fail(s: FakeDeployment, **behaviour: Any) -> None:
    """Make whichever D receives a request first fail it in this way."""
    for decode in s.decodes:
        emits = decode.behaviour.emits_first_token
        decode.behaviour = Behaviour(spares_retries=True, emits_first_token=emits, **behaviour)


def prompt_of(seen: ReceivedRequest) -> list[int]:
    """The token ids that a D received as its prompt."""
    params = seen.body["kv_transfer_params"]
    found: list[int] = params.get("prompt_token_ids") or seen.body["prompt"]
    return found


def check_complete(events: list[Any], num_tokens: int = 5) -> None:
    """Check that events are one answer: one id, one chunk type, all tokens once, one usage and one
    end."""
    assert streamed_text(events) == text_of(num_tokens)
    assert events[-1] == "[DONE]"
    usage = events[-2]["usage"]
    counts = [usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")]
    assert counts == [len(PROMPT_IDS), num_tokens, len(PROMPT_IDS) + num_tokens]
    assert len({event["id"] for event in events[:-1]}) == 1
    assert len({event["object"] for event in events[:-1]}) == 1
    assert len({event["created"] for event in events[:-1]}) == 1
    roles = [c["delta"] for e in events[:-1] for c in e["choices"] if "delta" in c]
    assert sum("role" in delta for delta in roles) == bool(roles)
    assert not any("token_ids" in c for e in events[:-1] for c in e["choices"])


@pytest.mark.parametrize("flow", ["pull", "push"])
@pytest.mark.parametrize("first_token", ["by the proxy", "by D", "as prompt"])
@pytest.mark.parametrize(("cut", "die_after"), [("one", 2), ("split", 13)])
@pytest.mark.parametrize("path", PATHS)
def test_stream_of_lost_decoder_is_migrated(
    path: str, cut: str, die_after: int, first_token: str, flow: str
) -> None:
    async def main() -> None:
        emits = first_token != "by the proxy"
        async with fake_deployment(emits_first_token=emits, flow=flow, **MIGRATES) as s:
            s.prefill.behaviour.continues_prompt = first_token == "as prompt"
            s.prefill.behaviour.last_token_id = None
            let_fail(s, die_after=die_after, cut=cut)
            body = (CHAT if "chat" in path else BODY) | USAGE
            check_complete(events_of((await post(s, body, path)).text))
            assert sorted(len(decode.generated) for decode in s.decodes) == [1, 1]
            again = s.prefill.generated[1]
            assert again.path == "/v1/completions"
            sent = again.body["prompt"]
            assert sent == [*PROMPT_IDS, *map(token_id, range(len(sent) - len(PROMPT_IDS)))]
            assert again.headers["x-request-id"] == "abc-1"
            assert s.count("migrated") == 1
            assert s.count("stream_errors") == 0
            if first_token == "as prompt" and flow == "pull":
                asked = [prompt_of(decode.generated[0]) for decode in s.decodes]
                firsts = [PROMPT_IDS, sent]
                wanted = [[*ids, token_id(len(ids) - len(PROMPT_IDS))] for ids in firsts]
                assert sorted(asked) == sorted(wanted)

    uvloop.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_stream_of_lost_both_role_instance_is_migrated(path: str) -> None:
    async def main() -> None:
        settings = {"num_prefills": 0, "num_decodes": 0, "num_both": 2, "migrates_streams": True}
        async with fake_deployment(**settings) as s:
            let_fail(s, die_after=3)
            body = (CHAT if "chat" in path else BODY) | USAGE
            check_complete(events_of((await post(s, body, path)).text))

    uvloop.run(main())


def test_hung_decoder_is_abandoned_and_not_retried() -> None:
    async def main() -> None:
        limits = ClientLimits(stall_timeout_s=0.3, first_byte_timeout_s=0.3)
        async with fake_deployment(client=limits, **MIGRATES) as s:
            let_fail(s, hang_after=2)
            check_complete(events_of((await post(s, BODY | USAGE)).text))
            assert sorted(len(decode.generated) for decode in s.decodes) == [1, 1]

    uvloop.run(main())


def test_decoder_shutdown_uses_no_retry_and_loses_no_stream() -> None:
    async def main() -> None:
        async with fake_deployment(retry_ratio=0.0, retry_reserve=0, **MIGRATES) as s:
            let_fail(s, error_after=2, error_code="shutting_down", token_delay_s=0.01)
            check_complete(events_of((await post(s, BODY | USAGE)).text))
            assert s.count("migrated") == 1

    uvloop.run(main())


@pytest.mark.parametrize("num_decodes", [1, 2])
def test_decoder_lost_after_last_token_needs_no_new_prefill(num_decodes: int) -> None:
    async def main() -> None:
        settings = MIGRATES | {"num_decodes": num_decodes}
        async with fake_deployment(emits_first_token=True, **settings) as s:
            let_fail(s, die_after=5)
            check_complete(events_of((await post(s, BODY | USAGE)).text))
            assert len(s.prefill.generated) == 1

    uvloop.run(main())


@pytest.mark.parametrize("first_token", ["by the proxy", "by D"])
@pytest.mark.parametrize("path", PATHS)
def test_migrated_stream_ends_if_prefill_ends_it(path: str, first_token: str) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=first_token == "by D", **MIGRATES) as s:
            s.prefill.behaviour.stops_later_passes = True
            let_fail(s, die_after=3)
            answer = await post(s, (CHAT if "chat" in path else BODY) | USAGE, path)
            events = events_of(answer.text)
            again = s.prefill.generated[1].body["prompt"]
            check_complete(events, num_tokens=len(again) - len(PROMPT_IDS) + 1)
            assert [c["finish_reason"] for e in events[:-1] for c in e["choices"]][-1] == "stop"
            assert s.count("migrated") == 1
            first_tokens = s.app.router.metrics.first_token_seconds
            assert sum(first_tokens.series[()][:-1]) == 1

    uvloop.run(main())


def test_stream_without_another_decoder_ends_with_error() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=1, migrates_streams=True) as s:
            let_fail(s, drops=True)
            events = events_of((await post(s, BODY | USAGE)).text)
            assert streamed_text(events) == text_of(1)
            assert events[-1]["error"]["code"] == "connection_lost"

    uvloop.run(main())


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["never"]},
        {"n": 2},
        {"seed": 1, "temperature": 1.0},
        {"presence_penalty": 0.5},
        {"return_token_ids": True},
    ],
    ids=lambda more: next(iter(more)),
)
def test_stream_with_state_beyond_tokens_ends_with_error(more: dict[str, Any]) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, **MIGRATES) as s:
            s.prefill.behaviour.continues_prompt = True
            let_fail(s, die_after=3)
            events = events_of((await post(s, BODY | USAGE | more)).text)
            assert events[-1]["error"]["code"] == "connection_lost"
            assert s.count("migrated") == 0

    uvloop.run(main())


def unlimited(body: dict[str, Any]) -> dict[str, Any]:
    """A body without limits and parameters, which differ between passes."""
    changed = {"max_tokens", "max_completion_tokens", "min_tokens", "kv_transfer_params"}
    return {name: value for name, value in body.items() if name not in changed}


@pytest.mark.parametrize("flow", ["pull", "push"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["never"]},
        {"seed": 1, "temperature": 1.0},
        {"presence_penalty": 0.5},
        {"logprobs": 1},
        {"response_format": {"type": "json_object"}},
        {"tools": [], "max_completion_tokens": 5, "min_tokens": 4},
    ],
    ids=lambda more: next(iter(more)),
)
def test_instances_that_can_continue_any_answer_in_its_middle(
    more: dict[str, Any], path: str, flow: str
) -> None:
    async def main() -> None:
        async with fake_deployment(flow=flow, **MIGRATES) as s:
            s.report(continues_answers=True)
            let_fail(s, die_after=3)
            body = (CHAT if "chat" in path else BODY) | USAGE | more
            check_complete(events_of((await post(s, body, path)).text))
            first, again = s.prefill.generated
            asked = [d.generated[0].body for d in s.decodes]
            [second] = [each for each in asked if "generated_token_ids" in each]
            known = second["generated_token_ids"]
            assert known == [token_id(at) for at in range(len(known))] != []
            assert again.path == first.path == path
            assert unlimited(again.body) == unlimited(first.body) | {"generated_token_ids": known}
            assert not second["kv_transfer_params"].get("first_token_delivered")
            assert second["max_tokens"] == 5 - len(known)
            assert second.get("min_tokens") == (4 - len(known) if "min_tokens" in more else None)
            sent = {"generated_token_ids": known, "return_token_ids": True}
            assert unlimited(second) == unlimited(body) | sent
            assert s.count("migrated") == 1

    uvloop.run(main())


@pytest.mark.parametrize("continues_answers", [True, False])
@pytest.mark.parametrize("limits", [{"max_tokens": 5}, {"max_tokens": None}], ids=["5", "none"])
def test_migrated_stream_is_charged_as_an_unbroken_one(
    limits: dict[str, Any], continues_answers: bool
) -> None:
    async def main() -> None:
        team = ApiKey("k", "team", tokens_per_minute=600)
        config: Any = MIGRATES | {"api_keys": frozenset({"k"}), "tenants": (team,)}
        async with fake_deployment(**config) as s:
            s.report(continues_answers=continues_answers)
            beside_tokens = []
            for die_after in (None, 3):
                let_fail(s, die_after=die_after)
                async with httpx.AsyncClient(base_url=s.url, verify=NO_TLS) as client:
                    headers = {"authorization": "Bearer k", "x-request-id": "abc"}
                    answer = await client.post(
                        PATHS[1], json=CHAT | USAGE | limits, headers=headers
                    )
                events = events_of(answer.text)
                assert events[-1] == "[DONE]"
                num_requests, charged = s.app.process.tenants.limits.spent()["team"]
                assert num_requests == 1
                beside_tokens.append(charged - len(streamed_text(events).split()))
            assert s.count("migrated") == 1
            assert beside_tokens[0] == beside_tokens[1]

    uvloop.run(main())


def test_client_may_not_name_generated_tokens() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            refused = await post(s, BODY | {"generated_token_ids": [7]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                "generated_token_ids",
            )
            assert (await post(s, BODY | {"generated_token_ids": None})).status_code == 200

    uvloop.run(main())


def test_answer_continues_beside_instances_that_have_not_reported_yet() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=3, migrates_streams=True) as s:
            new = s.decodes[-1]
            s.report(continues_answers=True)
            instance = s.app.router.pool.get(new.url)
            instance.has_reported, instance.compatibility = False, Compatibility()
            s.app.router.pool.note_compatibility(
                s.app.router.pool.get(s.prefill.url), Compatibility("x", continues_answers=True)
            )
            for decode in s.decodes:  # whichever is asked first
                decode.behaviour = Behaviour(spares_retries=True, die_after=3)
            for _ in range(3):
                events = events_of((await post(s, CHAT | USAGE | {"tools": []}, PATHS[1])).text)
                check_complete(events)
            asked = [seen.body for seen in new.generated]
            assert not any("generated_token_ids" in body for body in asked)

    uvloop.run(main())


@pytest.mark.parametrize("num_decodes", [1, 2])
def test_answer_is_not_continued_by_instances_that_can_not(num_decodes: int) -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=num_decodes, migrates_streams=True) as s:
            s.report(continues_answers=True)
            body = CHAT | USAGE | {"tools": []}
            for decode in s.decodes:
                decode.behaviour = Behaviour(die_after=3, token_delay_s=0.2)
            answer = asyncio.ensure_future(post(s, body, PATHS[1]))
            await asyncio.wait([asyncio.ensure_future(asked(s))])
            s.report(continues_answers=False)
            assert events_of((await answer).text)[-1]["error"]["code"] == "connection_lost"
            assert sum(len(decode.generated) for decode in s.decodes) == 1

    uvloop.run(main())


async def asked(s: FakeDeployment) -> None:
    """Wait until a D has been asked."""
    waits = [
        asyncio.ensure_future(d.wait_for(lambda d=d: bool(d.generated)))  # type: ignore[misc]
        for d in s.decodes
    ]
    _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in pending:
        each.cancel()


def test_answer_whose_last_token_prefill_samples_is_ended_by_decoder() -> None:
    async def main() -> None:
        async with fake_deployment(**MIGRATES) as s:
            s.report(continues_answers=True)
            s.prefill.behaviour.stops_later_passes = True
            let_fail(s, die_after=3)
            check_complete(events_of((await post(s, CHAT | USAGE, PATHS[1])).text))
            assert s.count("fallbacks", "last_token") == 1

    uvloop.run(main())


def test_request_fails_after_two_lost_decoders() -> None:
    async def main() -> None:
        async with fake_deployment(num_decodes=3, migrates_streams=True) as s:
            for decode in s.decodes:
                decode.behaviour.die_after = 2
            events = events_of((await post(s, BODY | USAGE)).text)
            assert events[-1]["error"]["code"] == "connection_lost"
            assert sum(len(decode.generated) for decode in s.decodes) == 2
            assert (await post(s, BODY | USAGE)).status_code == 422

    uvloop.run(main())


def test_truncated_prompt_is_not_truncated_again() -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, **MIGRATES) as s:
            let_fail(s, die_after=3)
            cut = {"truncate_prompt_tokens": len(PROMPT_IDS), "truncation_side": "left"}
            check_complete(events_of((await post(s, BODY | USAGE | cut)).text))
            first, second = s.prefill.generated
            assert cut.items() <= first.body.items()
            assert not cut.keys() & second.body.keys()

    uvloop.run(main())


def test_min_tokens_counts_over_all_passes() -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, **MIGRATES) as s:
            let_fail(s, die_after=3)
            body = BODY | USAGE | {"min_tokens": 4}
            check_complete(events_of((await post(s, body)).text))
            second = next(
                d.generated[-1].body
                for d in s.decodes
                if d.generated[-1].body.get("min_tokens") != 4
            )
            assert (second["min_tokens"], second["max_tokens"]) == (1, 2)

    uvloop.run(main())


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_conductor_places_remaining_tokens_and_releases_reservations(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, **settings(flow=flow), **MIGRATES) as s:
            let_fail(s, die_after=3)
            check_complete(events_of((await post(s, BODY | USAGE)).text))
            check_nothing_is_reserved(s)

    uvloop.run(main())
