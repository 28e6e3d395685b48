"""A pair gives the tokens of one instance, by pull and by push."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.pd import GREEDY, Answer, Instance, Pair, ask, prompt_of
from support.push import WAYS, PushPair, run_beside_one

from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import SamplingParams

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True)
PENALISED = replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)
CHUNK = 64
"""Tokens per step, so that longer prompts are prefilled, and pushed, in several."""
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Layers, planes, heads, dimension, float32."""

Both = Pair | PushPair
AskBoth = Callable[..., Coroutine[Any, Any, Answer]]
Scenario = Callable[[Instance, Both, AskBoth], Coroutine[Any, Any, None]]


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> str:
    """How D gets the KV: by pull or by push."""
    name: str = request.param
    return name


def run(way: str, model: Path, scenario: Scenario, **options: Any) -> None:
    """Run a scenario on a single instance and on a pair that transfers KV in this way."""
    make_both, ask_both = WAYS[way]

    async def ask_by_the_way(single: Instance, both: Both) -> None:
        await scenario(single, both, partial(ask_both, both))

    run_beside_one(make_both, model, ask_by_the_way, **options)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prompts_of_every_length(way: str, model: Path, transport: str) -> None:
    async def scenario(single: Instance, both: Both, ask_both: AskBoth) -> None:
        for length in (1, 2, 15, 16, 17, 32, 63, 64, 65, 200, 499):
            prompt = prompt_of(length)
            expected = await ask(single, prompt)
            found = await ask_both(prompt)
            assert found.tokens == expected.tokens, f"prompt of {length} tokens"
            assert found.finish is expected.finish is FinishReason.LENGTH
        assert both.decode.stat("loads") == 11
        assert both.decode.stat("load_failures") == 0

    run(way, model, scenario, transports=(transport,), max_num_batched_tokens=CHUNK)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 16), (128, 16), (16, 128), (8, 32)])
def test_different_block_sizes(way: str, model: Path, prefill_size: int, decode_size: int) -> None:
    async def scenario(single: Instance, both: Both, ask_both: AskBoth) -> None:
        for length in (5, 100, 128, 300):
            prompt = prompt_of(length)
            expected = await ask(single, prompt)
            assert (await ask_both(prompt)).tokens == expected.tokens
        assert both.decode.stat("load_failures") == 0

    sizes = {"block_size": prefill_size}, {"block_size": decode_size}
    run(way, model, scenario, prefill=sizes[0], decode=sizes[1], max_num_batched_tokens=CHUNK)


@pytest.mark.parametrize("on_prefill", [False, True])
@pytest.mark.parametrize("on_decode", [False, True])
def test_prefix_cache_hits_on_either_side(
    way: str, model: Path, on_prefill: bool, on_decode: bool
) -> None:
    async def scenario(single: Instance, both: Both, ask_both: AskBoth) -> None:
        shared = prompt_of(80)
        if on_prefill:
            await ask(both.prefill, shared)
        if on_decode:
            await ask(both.decode, shared)
        for tail in (1, 16, 40):
            prompt = shared + prompt_of(tail, seed=tail)
            expected = await ask(single, prompt)
            before = both.decode.stat("bytes_received")
            found = await ask_both(prompt)
            assert found.tokens == expected.tokens
            if tail == 1:
                moved = both.decode.stat("bytes_received") - before
                assert moved == TOKEN_BYTES * (1 if on_decode else 81)
                assert found.num_cached_tokens == (80 if on_prefill else 0)

    run(way, model, scenario)


def test_fully_cached_prompt_transfers_nothing(way: str, model: Path) -> None:
    async def scenario(single: Instance, both: Both, ask_both: AskBoth) -> None:
        prompt = prompt_of(64)
        first, second = await ask_both(prompt), await ask_both(prompt)
        assert first.tokens == second.tokens == (await ask(single, prompt)).tokens
        assert both.decode.stat("bytes_received") == 64 * TOKEN_BYTES

    run(way, model, scenario)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_many_concurrent_requests_of_mixed_lengths(way: str, model: Path, transport: str) -> None:
    async def scenario(single: Instance, both: Both, ask_both: AskBoth) -> None:
        prompts = [prompt_of(1 + 37 * index % 190, seed=index) for index in range(32)]
        samplings = [replace(GREEDY, max_tokens=2 + index % 11) for index in range(32)]
        expected = [await ask(single, *case) for case in zip(prompts, samplings, strict=True)]
        found = await asyncio.gather(
            *(ask_both(*case) for case in zip(prompts, samplings, strict=True))
        )
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        assert both.decode.stat("load_failures") == 0

    blocks = {"prefill": {"num_kv_blocks": 40}, "decode": {"num_kv_blocks": 96}}
    run(way, model, scenario, transports=(transport,), max_num_batched_tokens=CHUNK, **blocks)


@pytest.mark.parametrize("sampling", [SEEDED, PENALISED], ids=["seeded", "penalised"])
def test_seeded_sampling_continues_at_its_position(
    way: str, model: Path, sampling: SamplingParams
) -> None:
    async def scenario(single: Instance, both: Both, ask_both: AskBoth) -> None:
        for length in (3, 90):
            for seed in range(4):
                case = prompt_of(length), replace(sampling, seed=seed)
                assert (await ask_both(*case)).tokens == (await ask(single, *case)).tokens

    run(way, model, scenario)


def test_log_probabilities_include_first_token(way: str, model: Path) -> None:
    async def scenario(single: Instance, both: Both, ask_both: AskBoth) -> None:
        case = prompt_of(30), replace(GREEDY, logprobs=3)
        expected, found = await ask(single, *case), await ask_both(*case)
        assert len(found.logprobs) == len(found.tokens) == GREEDY.max_tokens
        assert_close(found, expected)

    run(way, model, scenario)


def assert_close(found: Answer, expected: Answer) -> None:
    for mine, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert mine.token_id == other.token_id
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]
        assert [value for _, value in mine.top] == pytest.approx(
            [value for _, value in other.top], abs=1e-4
        )


def test_stop_token_sampled_by_decode_ends_answer(way: str, model: Path) -> None:
    async def scenario(single: Instance, both: Both, ask_both: AskBoth) -> None:
        prompt = prompt_of(40)
        third = (await ask(single, prompt)).tokens[2]
        case = prompt, replace(GREEDY, stop_token_ids=(third,))
        expected, found = await ask(single, *case), await ask_both(*case)
        assert found.tokens == expected.tokens
        assert found.finish is expected.finish is FinishReason.STOP

    run(way, model, scenario)
