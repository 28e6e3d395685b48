"""Prefill and decode apart, as processes, with other people's engines between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.pd import GREEDY, prompt_of
from support.pd_processes import Served, body_of, serving
from support.programs import TINY_LLAMA

pytestmark = pytest.mark.timeout(180)

PROMPTS = [prompt_of(length) for length in (1, 16, 17, 64, 200, 499)]


async def tokens_of(where: Served, prompt: Sequence[int], params: Any = None) -> list[int]:
    answer = await where.complete(body_of(prompt, GREEDY, params))
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What a single instance says."""

    async def main(single: Served) -> list[list[int]]:
        return [await tokens_of(single, prompt) for prompt in PROMPTS]

    with serving(TINY_LLAMA, "both") as single:
        return asyncio.run(main(single))


@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_same_tokens(transport: str, expected: list[list[int]]) -> None:
    async def main(prefill: Served, decode: Served) -> None:
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            params = await prefill.prefill(prompt)
            assert params["do_remote_prefill"]
            assert await tokens_of(decode, prompt, params) == answer, f"{len(prompt)} tokens"
        await prefill.wait_until_idle(20)
        await decode.wait_until_idle(20)
        assert await decode.figure("mooncake:kv_transfer_loads_total") == len(PROMPTS)

    forced = ("--transport", transport)
    with (
        serving(TINY_LLAMA, "prefill", *forced) as prefill,
        serving(TINY_LLAMA, "decode", *forced) as decode,
    ):
        asyncio.run(main(prefill, decode))
        assert [instance.program.end() for instance in (decode, prefill)] == [0, 0]
