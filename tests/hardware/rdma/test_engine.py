"""Prefill and decode instances that transfer KV over verbs give the same tokens as one instance."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from support.metaserver import metaserver
from support.pd import Instance, Pair, ask, ask_pair, instance, prompt_of
from support.push import LAYERWISE, PushPair, ask_pushed

from mooncake_engine.config import Role

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]

MODEL = Path(__file__).parents[3] / "examples" / "tiny-llama"
PROMPTS = [prompt_of(length) for length in (1, 33, 100)]
PATIENT = {"lease_s": 60.0, "transfer_timeout_s": 60.0}
"""The processor may be emulated, where a step takes a second or two."""


@pytest.fixture(autouse=True)
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the CPU backend's kernels, whose compilation takes an emulated CPU most of a minute."""
    monkeypatch.setenv("MOONCAKE_HAL_CPU_NATIVE", "0")


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[int]]]:
    """One instance's answer to each prompt."""

    async def main() -> list[list[int]]:
        async with instance(MODEL, dtype="float32") as single:
            return [(await ask(single, prompt)).tokens for prompt in PROMPTS]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MOONCAKE_HAL_CPU_NATIVE", "0")
        yield asyncio.run(main())


def test_one_rank_pulls_from_two(expected: list[list[int]]) -> None:
    async def main() -> None:
        async with side(Role.PREFILL, 32, tp_size=2) as first, side(Role.DECODE, 16) as second:
            both = Pair(first, second)
            found = await asyncio.gather(*(ask_pair(both, prompt) for prompt in PROMPTS))
            assert [answer.tokens for answer in found] == expected
            await check_came_across(both)

    asyncio.run(main())


def test_pushed_layer_by_layer(expected: list[list[int]]) -> None:
    async def main() -> None:
        options = {"connector": LAYERWISE}
        async with (
            side(Role.PREFILL, 32, **options) as first,
            side(Role.DECODE, 16, **options) as second,
        ):
            both = PushPair(Pair(first, second))
            async with metaserver(both.dispatch) as both.metaserver:
                found = await asyncio.gather(*(ask_pushed(both, prompt) for prompt in PROMPTS))
            assert [answer.tokens for answer in found] == expected
            await check_came_across(both.instances)

    asyncio.run(main())


def side(role: Role, block_size: int, **options: object) -> AbstractAsyncContextManager[Instance]:
    """One instance, which can transfer KV over rdma only."""
    sizes = {"block_size": block_size, "num_kv_blocks": 1024 // block_size}
    return instance(
        MODEL, role, transports=("rdma",), dtype="float32", **sizes, **PATIENT, **options
    )


async def check_came_across(both: Pair) -> None:
    """The KV was transferred and not recomputed, and every block is free again."""
    await both.check_clean(60.0)
    assert both.decode.stat("bytes_received") > 0
    assert both.decode.stat("load_failures") == 0
