"""A D that runs out of KV blocks returns the request for recomputation; the client still receives
one answer."""

from __future__ import annotations

from typing import Any

import pytest
import uvloop
from support.proxy_fakes import PROMPT_IDS, fake_deployment, text_of, token_id
from support.proxy_fakes_client import BODY, CHAT, events_of, post, streamed_text

USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("flow", ["pull", "push"])
@pytest.mark.parametrize("cut", ["one", "two", "split"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_recomputed_stream_continues_from_token_ids(path: str, cut: str, flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, recomputes=True, flow=flow) as s:
            s.decode.behaviour.recompute_after = 2
            s.decode.behaviour.cut = cut
            body = (CHAT if "chat" in path else BODY) | USAGE
            events = events_of((await post(s, body, path)).text)
            assert streamed_text(events) == text_of(5)
            assert events[-1] == "[DONE]"
            assert events[-2]["usage"] == {
                "prompt_tokens": 7,
                "completion_tokens": 5,
                "total_tokens": 12,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            assert len({event["id"] for event in events[:-1]}) == 1
            assert len({event["object"] for event in events[:-1]}) == 1
            assert not any("token_ids" in c for e in events[:-1] for c in e["choices"])
            second = s.prefill.generated[1]
            assert second.path == "/v1/completions"
            assert second.body["prompt"] == [*PROMPT_IDS, token_id(0), token_id(1)]
            assert second.headers["x-request-id"] == "abc-1"
            assert s.decode.generated[1].body["max_tokens"] == 3
            assert s.count("recomputed") == 1

    uvloop.run(main())


@pytest.mark.parametrize("flow", ["pull", "push"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_recomputed_answer_is_joined_from_all_passes(path: str, flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, recomputes=True, flow=flow) as s:
            s.decode.behaviour.recompute_after = 2
            body = CHAT if "chat" in path else BODY
            answer = (await post(s, body, path)).json()
            [choice] = answer["choices"]
            is_chat = "chat" in path
            text = choice["message"]["content"] if is_chat else choice["text"]
            assert text == text_of(5)
            assert answer["usage"]["completion_tokens"] == 5
            assert answer["object"] == ("chat.completion" if is_chat else "text_completion")
            assert answer["id"].endswith("-abc")

    uvloop.run(main())


SCHEMA: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}


@pytest.mark.parametrize(
    "field", [{"response_format": SCHEMA}, {"frequency_penalty": 0.5}, {"bad_words": ["a b"]}]
)
def test_whole_answer_that_depends_on_its_own_tokens_is_generated_again(
    field: dict[str, Any],
) -> None:
    """A second grammar in the middle of an answer would make it no JSON."""

    async def main() -> None:
        async with fake_deployment(emits_first_token=True, recomputes=True) as s:
            s.decode.behaviour.recompute_after = 2
            answer = (await post(s, BODY | field)).json()
            assert answer["choices"][0]["text"] == text_of(5)
            assert answer["usage"]["completion_tokens"] == 5
            first, second = s.prefill.generated
            assert first.body == second.body
            assert s.decode.generated[1].body["max_tokens"] == BODY["max_tokens"]

    uvloop.run(main())


def test_stream_with_grammar_is_not_continued_with_a_second_one() -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, recomputes=True) as s:
            s.decode.behaviour.recompute_after = 2
            events = events_of((await post(s, BODY | USAGE | {"response_format": SCHEMA})).text)
            assert events[-1]["error"]["code"] == "recomputed"
            assert len(s.prefill.generated) == 1
            plain = BODY | USAGE | {"response_format": {"type": "text"}}
            s.decode.behaviour.recompute_after = 2
            assert streamed_text(events_of((await post(s, plain)).text)) == text_of(5)

    uvloop.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answer_ending_in_second_prefill_keeps_earlier_tokens(path: str) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, recomputes=True) as s:
            s.decode.behaviour.recompute_after = 2
            s.prefill.behaviour.stops_later_passes = True
            answer = (await post(s, CHAT if "chat" in path else BODY, path)).json()
            [choice] = answer["choices"]
            is_chat = "chat" in path
            assert (choice["message"]["content"] if is_chat else choice["text"]) == text_of(3)
            assert choice["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == 3
            assert answer["object"] == ("chat.completion" if is_chat else "text_completion")
            ours = {"token_ids", "prompt_token_ids", "kv_transfer_params"}
            assert not ours & (answer.keys() | choice.keys())

    uvloop.run(main())


def test_first_token_is_not_sent_twice_after_recomputation() -> None:
    """Whether or not D emits P's first token itself, no token of P may precede the tokens that are
    decoded again."""

    async def main() -> None:
        async with fake_deployment(recomputes=True) as s:
            s.decode.behaviour.emits_first_token = True
            s.decode.behaviour.recompute_after = 2
            events = events_of((await post(s, BODY | USAGE)).text)
            assert streamed_text(events) == text_of(5)

    uvloop.run(main())


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_recompute_before_first_token_restarts_request(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, recomputes=True, flow=flow) as s:
            s.decode.behaviour.recompute_after = 0
            events = events_of((await post(s, BODY | USAGE)).text)
            assert streamed_text(events) == text_of(5)
            assert [seen.body["prompt"] for seen in s.prefill.generated] == [BODY["prompt"]] * 2
            assert s.count("recomputed") == 1

    uvloop.run(main())


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_unresumable_recompute_is_an_error_not_a_short_answer(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, flow=flow) as s:
            s.decode.behaviour.recompute_after = 2
            s.decode.behaviour.token_delay_s = 0.002
            events = events_of((await post(s, BODY | {"stream": True})).text)
            assert events[-1]["error"]["code"] == "recomputed"

    uvloop.run(main())


def test_token_limit_spans_passes_when_first_is_empty() -> None:
    async def main() -> None:
        async with fake_deployment(emits_first_token=True, recomputes=True) as s:
            s.decode.behaviour.recompute_after = 0
            s.decode.behaviour.recompute_again_after = 2
            events = events_of((await post(s, BODY | USAGE)).text)
            assert streamed_text(events) == text_of(5)
            assert s.count("recomputed") == 2

    uvloop.run(main())
