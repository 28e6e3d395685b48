"""Latent caches and experts over both connectors give the tokens of one instance."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.pd import ask, ask_pair, instance, pair, prompt_of, write_model
from support.push import ask_pushed, push_pair

LENGTHS = (1, 17, 100, 300)
CHUNK = 64
"""Tokens per step, so that longer prompts are prefilled in several steps."""

Options = dict[str, Any]
SIDES: list[tuple[Options, Options]] = [
    ({}, {}),
    ({"block_size": 128}, {"block_size": 16}),
    ({"block_size": 8}, {"block_size": 32}),
    ({"tp_size": 1, "block_size": 64}, {"tp_size": 2, "block_size": 16}),
    ({"tp_size": 2}, {"tp_size": 3}),
]
EXPERT_SIDES: tuple[Options, Options] = (
    {"tp_size": 2, "ep_size": 2, "ep_dispatch_min_tokens": 16},
    {"tp_size": 4, "ep_size": 2, "ep_dispatch_min_tokens": 1},
)
"""``make test-grid`` covers all pairs of sizes, those of these models with ``--experts``."""

CASES = [
    *(("deepseek_v3", sides) for sides in SIDES),
    *((family, SIDES[3]) for family in ("deepseek_v2", "mixtral")),
    ("deepseek_v2", EXPERT_SIDES),
]
PUSHED_CASES = [
    *(CASES[number] for number in (0, 1, 4, 6, 7)),
    *(pytest.param(*CASES[number], marks=pytest.mark.slow) for number in (2, 3, 5)),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_model(tmp_path_factory.mktemp(family), family)
        for family in ("deepseek_v2", "deepseek_v3", "mixtral")
    }


@pytest.mark.parametrize(("family", "sides"), CASES, ids=str)
def test_pull_gives_tokens_of_single_instance(
    family: str, sides: tuple[Options, Options], models: dict[str, Path]
) -> None:
    async def main() -> None:
        model = models[family]
        options = {"prefill": sides[0], "decode": sides[1], "max_num_batched_tokens": CHUNK}
        async with instance(model) as single, pair(model, **options) as both:
            for length in LENGTHS:
                prompt = prompt_of(length)
                expected = await ask(single, prompt)
                assert (await ask_pair(both, prompt)).tokens == expected.tokens
            assert both.decode.stat("loads") == len(LENGTHS)
            assert both.decode.stat("load_failures") == 0
            await both.check_clean()

    asyncio.run(main())


@pytest.mark.parametrize(("family", "sides"), PUSHED_CASES, ids=str)
def test_push_gives_tokens_of_single_instance(
    family: str, sides: tuple[Options, Options], models: dict[str, Path]
) -> None:
    async def main() -> None:
        model = models[family]
        options = {"prefill": sides[0], "decode": sides[1], "max_num_batched_tokens": CHUNK}
        async with instance(model) as single, push_pair(model, **options) as both:
            for length in LENGTHS:
                prompt = prompt_of(length)
                expected = await ask(single, prompt)
                assert (await ask_pushed(both, prompt)).tokens == expected.tokens
            assert both.decode.stat("loads") == len(LENGTHS)
            assert both.decode.stat("load_failures") == 0
            await both.check_clean()

    asyncio.run(main())


@pytest.mark.parametrize("tp_size", [1, 2])
def test_latent_is_transferred_once_per_receiving_rank(
    tp_size: int, models: dict[str, Path]
) -> None:
    """Every rank of P holds all latents, so each rank of D reads them from one."""

    async def main() -> None:
        sides = {"prefill": {"tp_size": 2}, "decode": {"tp_size": tp_size}}
        async with pair(models["deepseek_v3"], **sides) as both:
            await ask_pair(both, prompt_of(100))
            token_bytes = 2 * (48 + 16) * 4  # layers, latent and rope, float32
            assert both.decode.stat("bytes_received") == tp_size * 100 * token_bytes

    asyncio.run(main())
