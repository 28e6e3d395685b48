"""A decode instance drafts tokens from the first token that it receives, by pull and by push."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.pd import (
    GREEDY,
    Answer,
    Instance,
    Pair,
    ask,
    ask_pair,
    instance,
    pair,
    prompt_of,
    write_model,
)
from support.push import PushPair, ask_pushed, push_pair

from mooncake_engine.messages import SpeculationStats
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=12, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 65, 200)
CHUNK = 64
"""Tokens per step, so that D's draft model needs several steps for the longest prompt."""
Both = Pair | PushPair
Ask = Callable[[tuple[int, ...], SamplingParams], Awaitable[Answer]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def speculations(model: Path) -> list[SpeculativeConfig]:
    """Speculation with drafts that are always right, and with drafts that sometimes are."""
    return [
        SpeculativeConfig(SpeculativeMethod.DRAFT, 3, model),
        SpeculativeConfig(SpeculativeMethod.NGRAM, 3, prompt_lookup_min=1),
    ]


async def compare(single: Instance, both: Both, ask_both: Ask) -> SpeculationStats:
    """Send prompts of many lengths, one by one and concurrently; returns D's draft statistics."""
    cases = [(prompt_of(length), way) for length in LENGTHS for way in (GREEDY, SEEDED)]
    expected = [(await ask(single, *case)).tokens for case in cases]
    for case, tokens in zip(cases, expected, strict=True):
        assert (await ask_both(*case)).tokens == tokens
    together = await asyncio.gather(*(ask_both(*case) for case in cases))
    assert [answer.tokens for answer in together] == expected
    await both.check_clean()
    assert both.prefill.engine.stats().speculation is None
    stats = both.decode.engine.stats().speculation
    assert stats is not None
    assert stats.num_draft_tokens > 0
    return stats


@pytest.mark.parametrize(
    ("index", "is_ahead"),
    [(0, False), (1, False), (0, True)],
    ids=["draft", "ngram", "draft, steps ahead"],
)
@pytest.mark.parametrize(("both", "ask_both"), [(pair, ask_pair), (push_pair, ask_pushed)])
def test_prompts_prefilled_by_peer(
    model: Path, both: Any, ask_both: Any, index: int, *, is_ahead: bool
) -> None:
    """By pull and by push."""

    async def scenario() -> SpeculationStats:
        options = {
            "speculative_config": speculations(model)[index],
            "async_scheduling": is_ahead,
            "max_num_batched_tokens": CHUNK,
        }
        async with (
            instance(model) as single,
            both(model, **options) as of,
        ):
            return await compare(single, of, lambda *case: ask_both(of, *case))

    check_acceptance(index, asyncio.run(scenario()))


def check_acceptance(index: int, stats: SpeculationStats) -> None:
    """The draft model is the model itself: every draft must be accepted, so its KV must be
    right."""
    if index == 0:
        assert stats.num_accepted_tokens > 0.97 * stats.num_draft_tokens


def test_several_choices_of_one_prompt(model: Path) -> None:
    """The choices share the prompt's blocks, for which the draft model runs once."""

    async def scenario() -> SpeculationStats | None:
        options = {"speculative_config": speculations(model)[0]}
        async with instance(model) as single, push_pair(model, **options) as both:
            prompt = prompt_of(40)
            seeds = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True) for seed in range(3)]
            expected = [(await ask(single, prompt, sampling)).tokens for sampling in seeds]
            found = await asyncio.gather(
                *(ask_pushed(both, prompt, sampling, group="g") for sampling in seeds)
            )
            assert [answer.tokens for answer in found] == expected
            await both.check_clean()
            return both.decode.engine.stats().speculation

    stats = asyncio.run(scenario())
    assert stats is not None
    check_acceptance(0, stats)
