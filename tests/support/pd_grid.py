"""Every pair of tensor-parallel sizes: prefill over so many ranks, decode over so many others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.metaserver import metaserver
from support.pd import (
    GREEDY,
    Answer,
    Instance,
    Pair,
    ask,
    ask_pair,
    instance,
    prompt_of,
    write_model,
)
from support.push import LAYERWISE, PushPair, ask_pushed

from mooncake_engine.config import Role

PULL = "MooncakeConnector"
SIZES = (1, 2, 3, 4, 6, 8)
NUM_HEADS = 24
LENGTHS = (1, 16, 33, 100, 129, 200)
OPTIONS = {"lease_s": 20.0, "max_num_batched_tokens": 96}

Ask = Callable[[tuple[int, ...]], Awaitable[Answer]]


@dataclass(frozen=True)
class Setting:
    """What a grid is about.

    Args:
        connector: by name.
        kv_heads: of NUM_HEADS query heads; fewer than ranks makes replicas.
        block_sizes: of prefill and decode instance.
    """

    connector: str
    kv_heads: int
    block_sizes: tuple[int, int]


def write_grid_model(directory: Path, kv_heads: int) -> Path:
    """A model whose query heads can be divided over any of SIZES."""
    return write_model(
        directory,
        hidden_size=NUM_HEADS * 8,
        head_dim=8,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=kv_heads,
    )


async def expected_answers(model: Path) -> list[list[int]]:
    """What one instance of one rank says."""
    async with instance(model) as single:
        return [(await ask(single, prompt)).tokens for prompt in prompts()]


def prompts() -> list[tuple[int, ...]]:
    """What every pair is asked."""
    return [prompt_of(length, seed=length) for length in LENGTHS]


@asynccontextmanager
async def side(model: Path, role: Role, setting: Setting, tp_size: int) -> AsyncIterator[Instance]:
    """One instance of a grid."""
    block_size = setting.block_sizes[role is Role.DECODE]
    options = {**OPTIONS, "connector": setting.connector, "num_kv_blocks": 2048 // block_size}
    async with instance(model, role, tp_size=tp_size, block_size=block_size, **options) as running:
        yield running


async def check_pair(both: Pair, setting: Setting, expected: Sequence[list[int]]) -> None:
    """Answers are those of the single instance, by KV that came across, and all is given back.

    Raises:
        AssertionError: they are not.
    """
    async with asker(both, setting) as ask_both:
        first = await ask_both(prompts()[-1])
        answers = await asyncio.gather(*(ask_both(prompt) for prompt in prompts()))
    assert [answer.tokens for answer in answers] == list(expected), "wrong tokens"
    assert first.tokens == expected[-1], "wrong tokens"
    assert both.decode.stat("load_failures") == 0, "a load failed"
    assert both.decode.stat("bytes_received") > 0, "nothing came across"
    await both.check_clean(30.0)


@asynccontextmanager
async def asker(both: Pair, setting: Setting) -> AsyncIterator[Ask]:
    """How a pair is asked, by pull or by push."""
    if setting.connector != LAYERWISE:
        yield lambda prompt: ask_pair(both, prompt, GREEDY)
        return
    pushed = PushPair(both)
    async with metaserver(pushed.dispatch) as pushed.metaserver:
        yield lambda prompt: ask_pushed(pushed, prompt, GREEDY)
