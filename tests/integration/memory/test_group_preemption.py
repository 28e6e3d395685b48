"""Several choices of one prompt on a pair: the prompt is transferred once, even after
preemption."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.pd import ORDER, Answer, Instance, Pair, ask, instance, pair, prompt_of, write_model
from support.push import PushPair, ask_pushed, push_pair

from mooncake_engine.sampling_params import SamplingParams

SAMPLING = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)
SEEDS = (3, 4, 5)
PROMPT = prompt_of(45)
"""Tokens: two blocks of sixteen, and most of a third."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def seeded(seed: int, **changes: Any) -> SamplingParams:
    return replace(SAMPLING, seed=seed, **changes)


async def single_answers(model: Path) -> list[list[int]]:
    """Answers of one instance, one request at a time."""
    async with instance(model, prefix_caching=False) as single:
        return [(await ask(single, PROMPT, seeded(seed))).tokens for seed in SEEDS]


async def all_of(asked: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    return list(await asyncio.gather(*asked))


def test_pulled_prompt_is_transferred_once(model: Path) -> None:
    async def at_prefill(where: Instance) -> list[Answer]:
        once = [seeded(seed, max_tokens=1) for seed in SEEDS]
        return await all_of([ask(where, PROMPT, each, ORDER, group="p") for each in once])

    async def scenario(both: Pair) -> None:
        first = await at_prefill(both.prefill)
        asked = [
            ask(both.decode, PROMPT, seeded(seed), answer.params, group="d")
            for seed, answer in zip(SEEDS, first, strict=True)
        ]
        await check_transferred_once(model, both, asked)

    async def main() -> None:
        async with pair(model) as both:
            await scenario(both)

    asyncio.run(main())


def test_pushed_prompt_is_transferred_once(model: Path) -> None:
    async def main() -> None:
        async with push_pair(model) as both:
            asked = [ask_pushed(both, PROMPT, seeded(seed), group="d") for seed in SEEDS]
            await check_transferred_once(model, both, asked)

    asyncio.run(main())


async def check_transferred_once(
    model: Path, both: Pair | PushPair, asked: list[Coroutine[Any, Any, Answer]]
) -> None:
    answers = await all_of(asked)
    assert [answer.tokens for answer in answers] == await single_answers(model)
    assert both.decode.stat("load_failures") == 0
    assert both.decode.stat("bytes_received") == bytes_of_prompt(both.decode)
    await both.check_clean()


def bytes_of_prompt(where: Instance) -> int:
    """Bytes of the KV of the prompt's tokens, counted once."""
    facts = where.core._executor.info
    shard = facts.ranks[0].shard
    per_token = sum(facts.geometry.plane_dims) * shard.heads * facts.geometry.element_bytes
    return per_token * shard.layers * len(PROMPT)
