"""A D that would repeat the first token receives it as the end of its prompt; the client receives
it at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvloop
from support.proxy_fakes import PROMPT_IDS, FakeDeployment, fake_deployment, text_of, token_id, word
from support.proxy_fakes_client import BODY, CHAT, STREAM, events_of, post, streamed_text

Json = dict[str, Any]
USAGE: Json = {"stream": True, "stream_options": {"include_usage": True}}
PATHS = {"/v1/completions": BODY, "/v1/chat/completions": CHAT}


@asynccontextmanager
async def vllm_pair(**config: Any) -> AsyncIterator[FakeDeployment]:
    """A P and a D that behave as vLLM with our connector."""
    async with fake_deployment(emits_first_token=True, **config) as s:
        for fake in s.prefills:
            fake.behaviour.continues_prompt = True
            fake.behaviour.last_token_id = token_id(0)
        yield s


@pytest.mark.parametrize("cut", ["one", "two", "split"])
@pytest.mark.parametrize("path", PATHS)
def test_answer_joins_first_token_and_continuation(path: str, cut: str) -> None:
    async def main() -> None:
        async with vllm_pair() as s:
            s.decode.behaviour.cut = cut
            answer = await post(s, PATHS[path] | USAGE | {"min_tokens": 3}, path)
            events = events_of(answer.text)
            assert streamed_text(events) == text_of(5)
            assert events[-2]["usage"] | {"prompt_tokens_details": None} == {
                "prompt_tokens": 7,
                "completion_tokens": 5,
                "total_tokens": 12,
                "prompt_tokens_details": None,
            }
            assert len({event["id"] for event in events[:-1]}) == 1
            if "chat" in path:
                deltas = [e["choices"][0]["delta"] for e in events[:-1] if e["choices"]]
                assert ["role" in delta for delta in deltas] == [True, *[False] * 5]
            [asked] = s.prefill.generated
            assert asked.body["return_token_ids"] is True
            [decoded] = s.decode.generated
            params = decoded.body["kv_transfer_params"]
            ids = params["prompt_token_ids"] if "chat" in path else decoded.body["prompt"]
            assert ids == [*PROMPT_IDS, token_id(0)]
            assert (decoded.body["max_tokens"], decoded.body["min_tokens"]) == (4, 2)
            assert params["first_token_delivered"] is True

    uvloop.run(main())


def test_continued_first_token_arrives_before_decoder_responds() -> None:
    async def main() -> None:
        async with vllm_pair() as s:
            s.decode.behaviour.hangs = True
            async with (
                httpx.AsyncClient(base_url=s.url) as client,
                client.stream("POST", "/v1/completions", json=STREAM) as answer,
            ):
                chunk = await asyncio.wait_for(anext(answer.aiter_text()), 2)
                assert streamed_text(events_of(chunk)) == word(0)

    uvloop.run(main())


@pytest.mark.parametrize(
    "extra",
    [
        {"stop": ["t9"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.1},
        {"seed": 7},
        {"seed": 7, "temperature": 0.5},
        {"response_format": {"type": "json_object"}},
        {"return_token_ids": True},
        {"logprobs": 1},
        {"logprobs": 0},
        {"n": 2},
        {"truncate_prompt_tokens": -1},
    ],
)
def test_sampling_that_needs_past_output_disables_continuation(extra: Json) -> None:
    async def main() -> None:
        async with vllm_pair() as s:
            answer = await post(s, STREAM | extra)
            assert streamed_text(events_of(answer.text)) == text_of(5)
            [decoded] = s.decode.generated
            assert decoded.body["kv_transfer_params"]["first_token_delivered"] is False
            assert decoded.body["prompt"] == BODY["prompt"]

    uvloop.run(main())


@pytest.mark.parametrize(
    "name",
    [
        *("image_url", "image_pil", "image_embeds", "input_image", "input_audio", "audio_url"),
        *("audio_embeds", "video_url", "video_embeds", "prompt_embeds"),
    ],
)
def test_content_part_with_null_media_disables_continuation(name: str) -> None:
    """P reads the part as text, as its type says; D renders the messages, without P's token."""
    part = {"type": "text", "text": "hi", name: None}

    async def main() -> None:
        async with vllm_pair() as s:
            messages = [{"role": "user", "content": [part]}]
            chat = CHAT | {"stream": True, "messages": messages}
            answer = await post(s, chat, "/v1/chat/completions")
            assert streamed_text(events_of(answer.text)) == text_of(5)
            params = s.decode.generated[0].body["kv_transfer_params"]
            assert params["first_token_delivered"] is False
            assert "prompt_token_ids" not in params

    uvloop.run(main())


@pytest.mark.parametrize(
    "extra",
    [
        {"stop": None},
        {"seed": 7, "temperature": 0},
        {"stop": []},
        {"logprobs": None},
        {"logprobs": False},
    ],
)
def test_fields_without_effect_keep_continuation(extra: Json) -> None:
    async def main() -> None:
        async with vllm_pair() as s:
            answer = await post(s, STREAM | extra)
            assert streamed_text(events_of(answer.text)) == text_of(5)
            assert s.decode.generated[0].body["kv_transfer_params"]["first_token_delivered"] is True

    uvloop.run(main())


@pytest.mark.parametrize("name", ["presence_penalty", "temperature", "truncate_prompt_tokens"])
def test_number_beyond_float_range_is_left_to_instances(name: str) -> None:
    async def main() -> None:
        async with vllm_pair() as s:
            body = json.dumps(STREAM | {"seed": 7})[:-1] + f', "{name}": 1e999}}'
            async with httpx.AsyncClient(base_url=s.url) as client:
                answer = await client.post("/v1/completions", content=body)
            assert answer.status_code == 200
            assert len(s.decode.generated) == 1

    uvloop.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_prompt_is_truncated_once(path: str) -> None:
    """P returns the token ids of the truncated prompt, which do not include P's own token."""

    async def main() -> None:
        async with vllm_pair() as s:
            cut = {"truncate_prompt_tokens": len(PROMPT_IDS), "truncation_side": "left"}
            answer = await post(s, PATHS[path] | USAGE | cut, path)
            assert streamed_text(events_of(answer.text)) == text_of(5)
            [asked], [decoded] = s.prefill.generated, s.decode.generated
            assert cut.items() <= asked.body.items()
            assert not cut.keys() & decoded.body.keys()
            assert decoded.body["kv_transfer_params"]["first_token_delivered"] is True

    uvloop.run(main())


@pytest.mark.parametrize("text", ["", "caf\ufffd"])
def test_incomplete_character_disables_continuation(text: str) -> None:
    async def main() -> None:
        async with vllm_pair() as s:
            s.prefill.behaviour.first_text = text
            answer = await post(s, STREAM)
            assert streamed_text(events_of(answer.text)) == text_of(5)
            assert s.decode.generated[0].body["prompt"] == BODY["prompt"]

    uvloop.run(main())


def test_non_streamed_answer_comes_from_decoder() -> None:
    async def main() -> None:
        async with vllm_pair() as s:
            answer = await post(s, BODY)
            assert answer.json()["choices"][0]["text"] == text_of(5)
            assert "return_token_ids" not in s.prefill.generated[0].body

    uvloop.run(main())


def test_decoder_fails_over_after_first_token() -> None:
    async def main() -> None:
        async with vllm_pair(num_decodes=2) as s:
            s.decodes[0].behaviour.drops = True
            for _ in range(40):  # the choice between two idle ones is random
                answer = await post(s, STREAM)
                assert streamed_text(events_of(answer.text)) == text_of(5)
                if s.decodes[0].generated:
                    break
            assert s.decodes[0].generated

    uvloop.run(main())
