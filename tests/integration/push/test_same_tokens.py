"""What a pushed request says is what one instance says, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pd import GREEDY, Answer, Instance, ask, instance, prompt_of
from support.push import PushPair, ask_pushed, push_pair

from mooncake_engine.kv_transfer.push.worker import PushWorker
from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import SamplingParams

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True)
slow = pytest.mark.slow
CHUNK = 64
"""Tokens per step: longer prompts are prefilled, and sent, in several."""

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Layers, planes, heads, dimension, float32."""

Scenario = Callable[[Instance, PushPair], Coroutine[Any, Any, None]]


def run(model: Path, scenario: Scenario, **options: Any) -> None:
    """Run a scenario on a single instance and a pair; afterwards every block is back."""

    async def main() -> None:
        async with instance(model) as single, push_pair(model, **options) as both:
            await scenario(single, both)
            await both.check_clean()

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prompts_of_every_length(model: Path, transport: str) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        for length in (1, 2, 15, 16, 17, 32, 63, 64, 65, 200, 499):
            prompt = prompt_of(length)
            expected = await ask(single, prompt)
            found = await ask_pushed(both, prompt)
            assert found.tokens == expected.tokens, f"prompt of {length} tokens"
            assert found.finish is expected.finish is FinishReason.LENGTH
        assert both.decode.stat("loads") == 11
        assert both.decode.stat("load_failures") == 0
        assert both.decode.stat("bytes_received") == both.prefill.stat("bytes_sent") > 0

    run(model, scenario, transports=(transport,), max_num_batched_tokens=CHUNK)


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 16), (128, 16), (16, 128), (8, 32)])
def test_block_sizes_may_differ(model: Path, prefill_size: int, decode_size: int) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        for length in (5, 100, 128, 300):
            prompt = prompt_of(length)
            expected = await ask(single, prompt)
            assert (await ask_pushed(both, prompt)).tokens == expected.tokens
        assert both.decode.stat("load_failures") == 0

    sizes = {"block_size": prefill_size}, {"block_size": decode_size}
    run(model, scenario, prefill=sizes[0], decode=sizes[1], max_num_batched_tokens=CHUNK)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp"),
    [(1, 2), (2, 1), *(pytest.param(*pair, marks=slow) for pair in ((2, 2), (3, 2), (4, 2)))],
)
def test_tensor_parallel_pairs(model: Path, prefill_tp: int, decode_tp: int) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        for length in (1, 33, 200):
            prompt = prompt_of(length)
            expected = await ask(single, prompt)
            assert (await ask_pushed(both, prompt)).tokens == expected.tokens
        assert both.decode.stat("load_failures") == 0

    sizes = {"tp_size": prefill_tp}, {"tp_size": decode_tp}
    run(model, scenario, prefill=sizes[0], decode=sizes[1], max_num_batched_tokens=CHUNK)


def test_prompts_in_pieces(model: Path) -> None:
    """Whose layers are heard of between the graphs, on both ranks."""

    async def scenario(single: Instance, both: PushPair) -> None:
        for length in (1, 33, 200):
            prompt = prompt_of(length)
            expected = await ask(single, prompt)
            assert (await ask_pushed(both, prompt)).tokens == expected.tokens
        assert both.decode.stat("load_failures") == 0

    options = {"max_num_batched_tokens": CHUNK, "piecewise_graph_max_tokens": CHUNK}
    run(model, scenario, prefill={"tp_size": 2}, **options)


@pytest.mark.parametrize("on_prefill", [False, True])
@pytest.mark.parametrize("on_decode", [False, True])
def test_prefix_cache_hits_on_either_side(model: Path, on_prefill: bool, on_decode: bool) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        shared = prompt_of(80)
        if on_prefill:
            await ask(both.prefill, shared)
        if on_decode:
            await ask(both.decode, shared)
        for tail in (1, 16, 40):
            prompt = shared + prompt_of(tail, seed=tail)
            expected = await ask(single, prompt)
            before = both.decode.stat("bytes_received")
            found = await ask_pushed(both, prompt)
            assert found.tokens == expected.tokens
            if tail == 1:
                moved = both.decode.stat("bytes_received") - before
                assert moved == TOKEN_BYTES * (1 if on_decode else 81)
                assert found.num_cached_tokens == (80 if on_prefill else 0)

    run(model, scenario, max_num_batched_tokens=CHUNK)


def test_a_prompt_that_the_decode_side_has_whole_moves_nothing(model: Path) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        prompt = prompt_of(64)
        first, second = await ask_pushed(both, prompt), await ask_pushed(both, prompt)
        assert first.tokens == second.tokens == (await ask(single, prompt)).tokens
        assert both.decode.stat("bytes_received") == 64 * TOKEN_BYTES

    run(model, scenario)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_many_requests_of_mixed_lengths_at_once(model: Path, transport: str) -> None:
    """So many that both instances run short of blocks."""

    async def scenario(single: Instance, both: PushPair) -> None:
        prompts = [prompt_of(1 + 37 * index % 190, seed=index) for index in range(32)]
        samplings = [replace(GREEDY, max_tokens=2 + index % 11) for index in range(32)]
        expected = [await ask(single, *case) for case in zip(prompts, samplings, strict=True)]
        found = await asyncio.gather(
            *(ask_pushed(both, *case) for case in zip(prompts, samplings, strict=True))
        )
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
        assert both.decode.stat("load_failures") == 0

    blocks = {"prefill": {"num_kv_blocks": 40}, "decode": {"num_kv_blocks": 96}}
    run(model, scenario, transports=(transport,), max_num_batched_tokens=CHUNK, **blocks)


def test_seeded_sampling_continues_where_it_was(model: Path) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        for length in (3, 90):
            for seed in range(4):
                case = prompt_of(length), replace(SEEDED, seed=seed)
                assert (await ask_pushed(both, *case)).tokens == (await ask(single, *case)).tokens

    run(model, scenario)


def test_log_probabilities_include_the_first_tokens(model: Path) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        case = prompt_of(30), replace(GREEDY, logprobs=3)
        expected, found = await ask(single, *case), await ask_pushed(both, *case)
        assert len(found.logprobs) == len(found.tokens) == GREEDY.max_tokens
        assert_close(found, expected)

    run(model, scenario)


def assert_close(found: Answer, expected: Answer) -> None:
    for mine, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert mine.token_id == other.token_id
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]


def test_an_answer_may_end_with_its_first_token(model: Path) -> None:
    """By length, by a stop token, and by the end of the context."""

    async def scenario(single: Instance, both: PushPair) -> None:
        prompt = prompt_of(40)
        first = (await ask(single, prompt)).tokens[0]
        ending = replace(GREEDY, stop_token_ids=(first,))
        for case, finish in (
            ((prompt, replace(GREEDY, max_tokens=1)), FinishReason.LENGTH),
            ((prompt, ending), FinishReason.STOP),
            ((prompt_of(511), replace(GREEDY, max_tokens=None)), FinishReason.LENGTH),
        ):
            found = await ask_pushed(both, *case)
            assert found.tokens == (await ask(single, *case)).tokens
            assert (len(found.tokens), found.finish) == (1, finish)

    run(model, scenario)


def test_a_stop_token_after_the_border_ends_the_answer(model: Path) -> None:
    async def scenario(single: Instance, both: PushPair) -> None:
        prompt = prompt_of(40)
        third = (await ask(single, prompt)).tokens[2]
        case = prompt, replace(GREEDY, stop_token_ids=(third,))
        expected, found = await ask(single, *case), await ask_pushed(both, *case)
        assert found.tokens == expected.tokens
        assert found.finish is expected.finish is FinishReason.STOP

    run(model, scenario)


@pytest.mark.parametrize("heard", [(), (1,)], ids=["none", "the second"])
def test_a_layer_whose_hook_did_not_fire_is_sent_at_the_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, heard: tuple[int, ...]
) -> None:
    layer_done = PushWorker._layer_done

    def miss(worker: PushWorker, active: Any, index: int) -> None:
        if index in heard:
            layer_done(worker, active, index)

    monkeypatch.setattr(PushWorker, "_layer_done", miss)

    async def scenario(single: Instance, both: PushPair) -> None:
        for length in (1, 200):
            prompt = prompt_of(length)
            assert (await ask_pushed(both, prompt)).tokens == (await ask(single, prompt)).tokens
        assert both.decode.stat("load_failures") == 0

    run(model, scenario, max_num_batched_tokens=CHUNK)
